"""Tokenizers from every kind of file equal `transformers`, whose reading of the same files is the oracle."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from serving.text.folder_tokenizer import read_folder
from serving.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving.text.vocabularies import (
    TEMPLATE,
    byte_level_folder,
    byte_level_gguf,
    sentencepiece_folder,
    sentencepiece_gguf,
    trained_on_code,
)

SAMPLES = [
    "",
    " ",
    "Hello, world!",
    "  two spaces before, two after  ",
    "tabs\tand\n\nnewlines\r\n   and runs      of spaces\n    indented\n\t\t",
    "def f(x: int) -> dict[str, float]:\n    return {'a': x * 0.5, \"b\": -1e-9}  # done\n",
    "12345 1 22 333 4444 3.14159 0x1F 1,000,000 ½ ² ٣",
    "columns    7   42\n  99",
    "naïve café — “quotes” … ellipsis, straße, İstanbul",
    "漢字かな交じり文。한국어 텍스트. العربية עברית हिन्दी ไทย",
    "😀 👨‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 \u200b\u00a0\ufeff",
    "I'll you're he's we'd THEY'LL don't",
    "<|im_start|>user\nhi<|im_end|> <s> </s> <unk> <|im_start",
    "a" * 300,
    "\x00\x01\x7f\x80 control",
    "https://example.org/a?b=c&d=%20#e user@example.org",
]
TEXTS = st.lists(st.sampled_from([*SAMPLES, " ", "\n", "7", "é", "😀", "<s>", "the ", "mill"]), max_size=6).map("".join)


def equal(ours: Tokenizer, oracle: Any, text: str) -> None:
    ids = oracle(text)["input_ids"]
    assert ours.encode(text) == ids, text
    assert ours.encode(text, add_special_tokens=False) == oracle(text, add_special_tokens=False)["input_ids"], text
    for skip in (True, False):
        expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


# ---- the default model -----------------------------------------------------------------------------------------

smollm2 = pytest.mark.real


@smollm2
def test_smollm2_cuts_around_every_digit(smollm2_pair: tuple[Tokenizer, Any]) -> None:
    tokenizer, _ = smollm2_pair
    assert [tokenizer.token_text(i) for i in tokenizer.encode("a  52")] == ["a", "  ", "5", "2"]


@smollm2
@pytest.mark.parametrize("text", SAMPLES)
def test_smollm2_equals_transformers(smollm2_pair: tuple[Tokenizer, Any], text: str) -> None:
    equal(*smollm2_pair, text)


@smollm2
@settings(deadline=None, max_examples=300)
@given(text=st.one_of(TEXTS, st.text(max_size=60)))
def test_smollm2_equals_transformers_on_any_text(smollm2_pair: tuple[Tokenizer, Any], text: str) -> None:
    equal(*smollm2_pair, text)


@smollm2
@settings(deadline=None, max_examples=300)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(0, 300), max_size=20))
def test_smollm2_decodes_any_tokens_as_transformers(smollm2_pair: tuple[Tokenizer, Any], ids: list[int]) -> None:
    ours, oracle = smollm2_pair
    for skip in (True, False):
        expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == expected


@smollm2
def test_smollm2_special_tokens(smollm2_pair: tuple[Tokenizer, Any]) -> None:
    ours, oracle = smollm2_pair
    assert (ours.bos_id, ours.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)
    assert ours.vocab_size == len(oracle) == 49152
    assert ours.special_ids == frozenset(range(17))
    assert ours.chat_template == oracle.chat_template


# ---- small ones of every kind ----------------------------------------------------------------------------------


@pytest.mark.parametrize("text", SAMPLES)
def test_sentencepiece_gguf_equals_transformers(tmp_path: Path, text: str) -> None:
    # transformers reads SentencePiece files of this architecture with the prefix rule of llama.cpp and Llama 2.
    path = sentencepiece_gguf(tmp_path / "model.gguf", architecture="phi3")
    equal(load_tokenizer(path), AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), text)


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe", "qwen2"])
@pytest.mark.parametrize("add_bos", [True, False])
def test_byte_level_gguf_equals_transformers(tmp_path: Path, pre: str, add_bos: bool) -> None:
    alone = tmp_path / "alone"  # or transformers would read the folder's tokenizer.json as well
    alone.mkdir()
    path = byte_level_gguf(alone / "model.gguf", byte_level_folder(tmp_path), pre=pre, add_bos=add_bos)
    ours, oracle = load_tokenizer(path), AutoTokenizer.from_pretrained(alone, gguf_file=path.name)
    for text in SAMPLES:
        equal(ours, oracle, text)
    assert (ours.encode("x")[0] == ours.bos_id) is add_bos


@pytest.mark.parametrize("write", [byte_level_folder, sentencepiece_folder])
def test_folder_equals_transformers(tmp_path: Path, write: Any) -> None:
    ours, oracle = load_tokenizer(write(tmp_path)), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for text in SAMPLES:
        equal(ours, oracle, text)
    assert (ours.bos_id, ours.eos_id) == (oracle.bos_token_id, oracle.eos_token_id)


def test_folder_with_vocab_and_merges(tmp_path: Path) -> None:
    ours = load_tokenizer(trained_on_code(tmp_path))
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*SAMPLES, "for i in range(10): print(i)"]:
        equal(ours, oracle, text)
    assert ours.encode("x")[0] == ours.bos_id == 1
    assert ours.special_ids == {0, 1}


def test_bos_without_a_flag_follows_the_vocabularys_habit(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    llama3 = load_tokenizer(byte_level_gguf(tmp_path / "a.gguf", folder, pre="llama-bpe"))
    gpt2 = load_tokenizer(byte_level_gguf(tmp_path / "b.gguf", folder, pre="gpt-2"))
    assert llama3.encode("x")[0] == llama3.bos_id
    assert gpt2.encode("x")[0] != gpt2.bos_id


def test_settings_of_a_training_run_do_not_cut_prompts(tmp_path: Path) -> None:
    file = byte_level_folder(tmp_path) / "tokenizer.json"
    content = json.loads(file.read_text())
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 2}
    content["padding"] |= {"pad_type_id": 0, "pad_token": "<|im_end|>"}
    file.write_text(json.dumps(content))
    text = "the mill stands where the river narrows"
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_tokens_marked_only_in_the_configuration_stay_whole(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    word = max((token for token in vocab if token.isalpha() and token.isascii()), key=len)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["added_tokens_decoder"] = {str(vocab[word]): {"content": word, "special": True, "normalized": False}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode(f"x{word}x")[1:-1] == [vocab[word]]
    assert vocab[word] in tokenizer.special_ids


def test_chat_templates_are_found_wherever_they_are(tmp_path: Path) -> None:
    folder = byte_level_folder(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert read_folder(folder).chat_templates == {"default": "A", "tool_use": "B"}
    (folder / "chat_template.jinja").write_text("C")
    assert load_tokenizer(folder).chat_template == "C"
    assert load_tokenizer(sentencepiece_gguf(tmp_path / "m.gguf")).chat_template == TEMPLATE


def test_what_cannot_be_read_is_refused_with_a_reason(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"neither a tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "not.gguf").write_bytes(b"something else")
    with pytest.raises(ValueError, match="not a GGUF file"):
        load_tokenizer(tmp_path / "not.gguf")
    folder = byte_level_folder(tmp_path)
    with pytest.raises(ValueError, match="'chatglm-bpe' is not supported"):
        load_tokenizer(byte_level_gguf(tmp_path / "odd.gguf", folder, pre="chatglm-bpe"))
    whole = byte_level_gguf(tmp_path / "whole.gguf", folder, pre="gpt-2").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="truncated"):
        load_tokenizer(tmp_path / "cut.gguf")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="WordPiece"):
        load_tokenizer(folder)


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    expected = [tokenizer.encode(text) for text in SAMPLES]
    found: list[list[list[int]]] = []
    threads = [
        threading.Thread(target=lambda: found.append([tokenizer.encode(text) for text in SAMPLES])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


def test_tokens_outside_the_vocabulary_have_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(tokenizer.vocab_size + 5) == ""
