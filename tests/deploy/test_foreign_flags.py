"""Flags of vLLM and SGLang: each becomes ours, is accepted because it is so anyway, or is refused with what to use."""

from __future__ import annotations

import argparse
import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.cli import COMMANDS, main, make_parser
from deploy.foreign_flags import ANY, BY_NAME, FLAGS, MODEL, ForeignFlagError, translate
from scripts.flags import commands
from tests.deploy.conftest import Started

NAMES = [name for flag in FLAGS for name in flag.names]
VALUE_ON_THE_WAY = {
    "--load-format",
    "--dtype",
    "--quantization",
    "--generation-config",
    "--attention-backend",
}  # ours, with values of others


def options(command: str) -> dict[str, argparse.Action]:
    parser = commands(make_parser())[command]
    return {name: action for action in parser._actions for name in action.option_strings}


def test_a_name_stands_once_and_hides_none_of_ours() -> None:
    assert len(set(NAMES)) == len(NAMES)
    ours = {name for command in COMMANDS for name in options(command)}
    assert ours & set(NAMES) == VALUE_ON_THE_WAY


def test_every_flag_has_an_outcome_that_exists() -> None:
    ours = options("serve")
    for flag in FLAGS:
        assert flag.always or flag.to or flag.instead, flag.names
        assert bool(flag.always) == bool(flag.told), flag.names
        assert flag.to in ("", MODEL) or flag.to in ours, flag.names
        choices = ours[flag.to].choices if flag.to in ours else None
        assert not choices or set(flag.values.values()) <= set(choices), flag.names


def test_a_command_line_of_vllm_starts_the_same_thing(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    line = """serve --model Qwen/Qwen3-4B --served-model-name large small --port 8001 --max_model_len 4096
        --max-num-seqs 64 --max-num-batched-tokens=2048 -tp 1 -pp 1 -dp 2
        --enable-expert-parallel --dtype half
        --enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 --trust-remote-code
        --enable-prefix-caching --enable-chunked-prefill --swap-space 4 --block-size 32 --enforce-eager
        --uvicorn-log-level warning --disable-log-requests --api-key sk-1 sk-2 --generation-config vllm
        --attention-backend FLASH_ATTN
        --load-format safetensors --num-gpu-blocks-override 500 --distributed-executor-backend mp"""
    with caplog.at_level(logging.INFO, logger="deploy.cli"):
        config = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
        assert main([*line.split(), "--speculative-config", config, "--chat-template", "{{ x }}"]) == 0
    made = started.settings
    assert (made.model, made.model_config.served_model_name) == ("Qwen/Qwen3-4B", ("large", "small"))
    assert (made.model_config.dtype, made.model_config.max_model_len) == ("float16", 4096)
    assert (made.model_config.load_format, made.model_config.generation_config) == ("auto", "none")
    engine = made.engine
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (64, 2048, 32)
    assert (engine.num_kv_blocks, engine.cuda_graphs, engine.attention_backend) == (500, False, "auto")
    assert (engine.speculation().method, engine.speculation().num_speculative_tokens) == ("ngram", 3)
    assert (made.http.port, made.logs.log_level, made.http.api_key) == (8001, "warning", "sk-1,sk-2")
    assert (made.http.tool_call_parser, made.http.reasoning_parser) == ("hermes", "qwen3")
    assert (made.http.chat_template, made.model_config.data_parallel_size) == ("{{ x }}", 2)
    told = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert "--enable-auto-tool-choice" in told and "--swap-space" in told
    assert made.model_config.rank_flags == "--data-parallel-size 2"


def test_a_command_line_of_sglang_starts_the_same_thing(started: Started) -> None:
    line = (
        "--model-path m --tp 1 --context-length 2048 --port 30000 --max-running-requests 8 --chunked-prefill-size 512"
    )
    more = "--disable-radix-cache --disable-cuda-graph --page-size 8 --schedule-policy fcfs --log-level-http error"
    more += " --mem-fraction-static 0.8 --attention-backend fa3"
    assert main(["serve", *line.split(), *more.split()]) == 0
    made, engine = started.settings, started.settings.engine
    assert (made.model, made.model_config.max_model_len, made.http.port) == ("m", 2048, 30000)
    assert (engine.max_num_seqs, engine.max_num_batched_tokens, engine.block_size) == (8, 512, 8)
    assert (engine.enable_prefix_caching, engine.cuda_graphs, engine.prefill_order) == (False, False, "fcfs")
    assert made.logs.log_level == "error" and engine.gpu_memory_utilization == 0.8


REFUSED = {
    "--enable-lora": "merge",
    "--seed 1": "`seed`",
    "--kv-transfer-config {}": "millrace prefill",
    '--speculative-config {"method":"eagle","num_speculative_tokens":2}': "ngram, draft_model, mtp",
    '--speculative-config {"method":"ngram","num_speculative_tokens":1e999}': "from 1 to 64",
    "--speculative-config nonsense": "method",
    "--speculative-algorithm EAGLE": "--speculative-config",
    "--cpu-offload-gb 4": "--host-kv-memory",
    "--scheduling-policy random": "--prefill-order",
    "--attention-backend quickest": "auto, triton or flashinfer",
    "--root-path /api": "proxy",
    "--max-logprobs 5": "at most 20",
    "--revision main": "hf download",
    "--model": "needs a value",
    "--model --port": "needs a value",
    "--model -pp": "needs a value",
    "--model -q=fp8": "needs a value",
    "--model -h": "needs a value",
    "--enforce-eager=yes": "takes no value",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_kept_is_one_line_that_names_the_flag_and_what_to_use(
    line: str, started: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "m", *line.split(" ", 1)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"millrace: {line.replace('=', ' ').split()[0]}") and REFUSED[line] in err
    assert err.count("\n") == 1 and started.settings is None


def test_other_commands_have_their_own_flags() -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--mem-fraction-static", "0.5"])


@given(st.lists(st.sampled_from([*NAMES, "--port", "80", "m", "1", "--", "x=y", "--max-num-seqs=3"]), max_size=8))
def test_whatever_is_given_is_ours_afterwards_or_refused(words: list[str]) -> None:
    try:
        known = translate(["serve", *words])
    except ForeignFlagError as error:
        assert str(error)
        return
    assert known.arguments[0] == "serve"
    ours, _, _ = "\0".join(known.arguments).partition("\0--\0")
    left = {word.partition("=")[0] for word in ours.split("\0")} & set(NAMES)
    assert left <= VALUE_ON_THE_WAY, "only what is ours as well"


COMPANY = {"-dpl": ("--data-parallel-size", "4", "--enable-expert-parallel")}  # without which one has no meaning


@pytest.mark.parametrize("name", NAMES)
def test_each_flag_is_taken_or_refused_by_the_parser(name: str, started: Started) -> None:
    flag = BY_NAME[name]
    good = next(iter(flag.values), "0.5" if flag.to == "--gpu-memory-utilization" else "4") if flag.to else "x"
    value = good if flag.always == ANY or not flag.always else flag.always[0]
    words = [name, value] if flag.takes else [name]
    if flag.always or flag.to:
        assert main(["serve", *words, *COMPANY.get(name, ())]) == 0
    else:
        with pytest.raises(ForeignFlagError, match=name):
            translate(["serve", *words])
