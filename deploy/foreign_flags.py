"""Flags of vLLM and SGLang: given to millrace they become ours, are the case anyway, or are refused with what to use.

`FLAGS` is the whole table; docs/cli.md shows it. Pure: it reads and writes lists of arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

ANY = ("*",)  # every value
MODEL = "MODEL"  # the positional argument


class ForeignFlagError(ValueError):
    """A flag of another server that has no equal here; the text says what to use instead."""


@dataclass(frozen=True, slots=True)
class ForeignFlag:
    """A flag by its names. What of it holds is the first of: `always`, `to`, `instead`.

    With a value among `always` it is dropped, and `told` is logged. Else it becomes `to`, its value renamed by `values`
    where that has it. Without `to`, or with `values` that have not its own, it is refused, and `instead` says why.
    """

    names: tuple[str, ...]
    takes: bool = True  # a value follows
    always: tuple[str, ...] = ()
    told: str = ""
    to: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    instead: str = ""


def switch(*names: str, to: str = "", told: str = "", instead: str = "") -> ForeignFlag:
    """A flag without a value."""
    return ForeignFlag(names, takes=False, always=ANY if told else (), told=told, to=to, instead=instead)


def kept(*names: str, told: str) -> ForeignFlag:
    """Whatever its value."""
    return ForeignFlag(names, always=ANY, told=told)


def becomes(to: str, *names: str) -> ForeignFlag:
    return ForeignFlag(names, to=to)


def refused(*names: str, instead: str) -> ForeignFlag:
    return ForeignFlag(names, instead=instead)


# What vLLM and SGLang call theirs. Of both, `triton` and `flashinfer` are ours too.
ATTENTION = (
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TORCH_SDPA", "XFORMERS", "CPU_ATTN", "ROCM_ATTN",
    "FLASH_ATTN_MLA", "FLASHINFER_MLA", "TRITON_MLA", "CUTLASS_MLA", "FLASHMLA",
    "fa3", "fa4", "flex_attention", "torch_native", "flashmla", "cutlass_mla", "trtllm_mha", "trtllm_mla", "aiter",
    "wave", "intel_amx", "nsa",
)  # fmt: skip
NO_LORA = "LoRA adapters are not served: merge the adapter into the weights and serve those"
OWN_CONFIG = "what a model is stands in its folder alone: change config.json in a copy of it"
HUB = "hub models go where HF_HOME says, and private ones need HF_TOKEN: set these in the environment"
DOWNLOAD = "fetch that revision with `hf download NAME --revision REVISION --local-dir FOLDER`, and serve FOLDER"
SEEDS = "there is no seed for all requests: each may have its own, as `seed` in its body"
APART = "`millrace serve --prefill N --decode M`, or `millrace prefill` and `millrace decode` on hosts of their own"
TOKENIZER = "the tokenizer is the one in the model's folder: put other files there"
DRAFT_MODEL = ("--speculative-model", "--speculative-draft-model-path")  # a name becomes JSON
GRAMMARS = "outputs are held to their form by llguidance"

FLAGS: tuple[ForeignFlag, ...] = (
    # The model and where it comes from.
    becomes(MODEL, "--model", "--model-path"),
    refused("--tokenizer", "--tokenizer-path", "--tokenizer-revision", instead=TOKENIZER),
    ForeignFlag(("--tokenizer-mode",), always=("auto", "hf"), told="there is one kind of tokenizer", instead=TOKENIZER),
    switch(
        "--skip-tokenizer-init", instead="text is always tokenized here; prompts may come as token ids all the same"
    ),
    refused("--revision", "--code-revision", instead=DOWNLOAD),
    refused("--download-dir", "--hf-token", instead=HUB),
    refused("--hf-overrides", "--hf-config-path", "--rope-scaling", "--rope-theta", instead=OWN_CONFIG),
    refused("--json-model-override-args", "--override-generation-config", instead=OWN_CONFIG),
    switch(
        "--trust-remote-code", told="no code out of a model's folder is ever run; models that need theirs are refused"
    ),
    ForeignFlag(
        ("--load-format",),
        always=("safetensors", "gguf", "hf"),
        told="weights are read in whatever form they are",
        to="--load-format",
    ),
    kept("--config-format", told="a model's configuration is read in whatever form it is"),
    ForeignFlag(("--dtype",), to="--dtype", values={"half": "float16", "float": "float32"}),
    ForeignFlag(
        ("--quantization", "-q"),
        always=("compressed-tensors", "gguf"),
        told="quantized weights are read as the model's folder says they are",
        to="--quantization",
    ),
    ForeignFlag(("--generation-config",), to="--generation-config", values={"vllm": "none"}),
    becomes("--max-model-len", "--context-length"),
    ForeignFlag(
        ("--runner", "--task"),
        always=("auto", "generate"),
        told="texts are generated",
        instead=("models are served as they are; nothing converts one for another task"),
    ),
    ForeignFlag(("--limit-mm-per-prompt",), instead="text alone is served: no images, audio or video"),
    switch("--enable-lora", instead=NO_LORA),
    refused(
        "--lora-modules", "--lora-paths", "--max-loras", "--max-lora-rank", "--max-loras-per-batch", instead=NO_LORA
    ),
    # Devices and workers.
    becomes("--tensor-parallel-size", "-tp", "--tp", "--tp-size"),
    becomes("--pipeline-parallel-size", "-pp", "--pp-size"),
    becomes("--data-parallel-size", "-dp", "--dp", "--dp-size"),
    becomes("--data-parallel-size-local", "-dpl"),
    becomes("--data-parallel-address", "-dpa"),
    becomes("--data-parallel-rpc-port", "-dpp"),
    ForeignFlag(
        ("--distributed-executor-backend",),
        always=("mp", "uni"),
        told="workers are processes of their own, or one with the server",
        instead="workers on other hosts: `millrace router` on one, `millrace prefill|decode|mixed --routers` on others",
    ),
    refused("--nnodes", "--node-rank", "--dist-init-addr", instead="`millrace router` and workers with --routers"),
    ForeignFlag(
        ("--api-server-count",),
        always=("1",),
        told="there is one",
        instead=("start several `millrace router` over the same workers, and a load balancer before them"),
    ),
    refused("--kv-transfer-config", "--disaggregation-mode", "--disaggregation-transfer-backend", instead=APART),
    refused("--disaggregation-bootstrap-port", "--disaggregation-ib-device", instead=APART),
    becomes("--gpu-memory-utilization", "--mem-fraction-static"),
    refused("--max-total-tokens", instead="--num-kv-blocks N: blocks of --block-size tokens"),
    becomes("--kv-cache-memory", "--kv-cache-memory-bytes"),
    becomes("--num-kv-blocks", "--num-gpu-blocks-override"),
    becomes("--block-size", "--page-size"),
    ForeignFlag(
        ("--cpu-offload-gb",),
        always=("0",),
        told="weights stay on the device",
        instead=("weights stay on the device; --host-kv-memory keeps old KV of long prompts in host memory"),
    ),
    kept("--swap-space", told="nothing is swapped: a sequence without blocks is computed again, or elsewhere"),
    # Batches and steps.
    becomes("--max-num-seqs", "--max-running-requests"),
    becomes("--max-num-batched-tokens", "--chunked-prefill-size"),
    switch("--enable-chunked-prefill", "--enable-mixed-chunk", told="long prompts always go in chunks"),
    switch("--no-enable-chunked-prefill", instead="long prompts go in chunks of --max-num-batched-tokens: raise that"),
    switch("--disable-radix-cache", to="--no-enable-prefix-caching"),
    ForeignFlag(
        ("--scheduling-policy", "--schedule-policy"),
        to="--prefill-order",
        values={"fcfs": "fcfs", "priority": "slack"},
        instead="--prefill-order slack (by priority and objectives) or fcfs",
    ),
    switch("--enforce-eager", "--disable-cuda-graph", to="--no-cuda-graphs"),
    kept("--max-seq-len-to-capture", "--cuda-graph-max-bs", told="graphs are captured for the sizes that occur"),
    kept("--compilation-config", told="steps are compiled kernels and CUDA graphs: --kernels, --cuda-graphs"),
    switch("--async-scheduling", "--enable-overlap", told="the next step begins while one runs, where that hides time"),
    ForeignFlag(
        ("--attention-backend",),
        always=ATTENTION,
        told="the quicker one of those that there are is taken, as with auto",
        to="--attention-backend",
        values={name: name for name in ("auto", "triton", "flashinfer")},
        instead="--attention-backend auto, triton or flashinfer",
    ),
    kept("--sampling-backend", told="there is one for each device: --kernels"),
    switch("--enable-deterministic-inference", to="--deterministic"),
    ForeignFlag(DRAFT_MODEL, to="--speculative-config", values={"[ngram]": '{"method": "ngram"}'}),
    refused("--speculative-algorithm", instead='--speculative-config {"method": …}: ngram, draft_model or mtp'),
    refused("--seed", "--random-seed", instead=SEEDS),
    # The API.
    switch("--enable-reasoning", told="thoughts are told apart as the model's template shows: --reasoning-parser"),
    switch("--enable-auto-tool-choice", told="tools are always served; --tool-call-parser none refuses them"),
    ForeignFlag(
        ("--chat-template-content-format",),
        always=("auto", "string"),
        told="templates get contents as texts",
        instead="templates get the texts of a message's parts, joined",
    ),
    ForeignFlag(("--response-role",), always=("assistant",), told="it is", instead="answers are the assistant's"),
    ForeignFlag(("--max-logprobs",), always=("20",), told="it is the most", instead="at most 20 are given, always"),
    kept("--guided-decoding-backend", "--structured-outputs-config", "--grammar-backend", told=GRAMMARS),
    switch("--enable-prompt-tokens-details", told="usage always says how many prompt tokens were cached"),
    switch("--enable-request-id-headers", told="answers always carry x-request-id"),
    switch("--enable-server-load-tracking", told="/load always answers"),
    ForeignFlag(
        ("--root-path",),
        always=("", "/"),
        told="paths begin at /",
        instead=("let the proxy take the path off before it passes a request on"),
    ),
    refused("--uds", instead="a socket in the file system is not listened on: --host 127.0.0.1, or a proxy before it"),
    refused("--middleware", instead="no code of others runs in the server: put a proxy before it"),
    refused(
        "--tool-parser-plugin",
        "--reasoning-parser-plugin",
        instead=("no code of others runs in the server: --tool-call-parser generic, --reasoning-parser auto"),
    ),
    ForeignFlag(("--lora-dtype",), instead=NO_LORA),
    # Logs and metrics.
    ForeignFlag(
        ("--uvicorn-log-level", "--log-level-http"),
        to="--log-level",
        values={name: name for name in ("debug", "info", "warning", "error")} | {"critical": "error", "trace": "debug"},
        instead="--log-level debug, info, warning or error",
    ),
    switch("--disable-log-requests", "--no-enable-log-requests", told="prompts and outputs are never logged"),
    switch("--enable-log-requests", "--log-requests", instead="prompts and outputs are never logged"),
    kept("--max-log-len", told="prompts and outputs are never logged"),
    switch(
        "--disable-log-stats",
        "--disable-uvicorn-access-log",
        told="figures are on /metrics, and accesses are logged with --access-log alone",
    ),
    switch("--enable-metrics", told="/metrics always answers; --metrics-prefix vllm gives it vLLM's names"),
    kept("--show-hidden-metrics-for-version", told="older names of metrics are always shown beside the newer"),
    switch("--disable-frontend-multiprocessing", "--disable-fastapi-docs", told="there is nothing to switch off"),
    switch("--skip-server-warmup", told="there is nothing to switch off"),
)
BY_NAME: Mapping[str, ForeignFlag] = {name: flag for flag in FLAGS for name in flag.names}


@dataclass(frozen=True, slots=True)
class Translated:
    """Arguments as our own parser takes them, and what to log of those that were dropped."""

    arguments: list[str]
    told: list[str]


def translate(arguments: Sequence[str]) -> Translated:
    """A command and its arguments, with the flags of others in our words. Raises ForeignFlagError."""
    command, rest = list(arguments[:1]), list(arguments[1:])
    found, told = list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        if word == "--":
            found += [word, *rest]
            break
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        flag = BY_NAME.get(name)
        if flag is None:
            found.append(name + equals + value if name.startswith("--") else word)
            continue
        if equals and not flag.takes:
            raise ForeignFlagError(f"{name} takes no value")
        if flag.takes and not equals:
            if not rest or _is_flag(rest[0]):
                raise ForeignFlagError(f"{name} needs a value")
            value = rest.pop(0)
        _take(flag, name, value, found, told, command)
    return Translated(command + found, told)


def _is_flag(word: str) -> bool:
    """True if it cannot be a value: argparse takes numbers alone for one with a dash."""
    try:
        float(word)
    except ValueError:
        return word.startswith("-") and word != "-"
    return False


def _take(flag: ForeignFlag, name: str, value: str, found: list[str], told: list[str], command: list[str]) -> None:
    """Add what the flag becomes. Raises ForeignFlagError."""
    if flag.always == ANY or value in flag.always:
        told.append(f"{name}: {flag.told}")
    elif name in DRAFT_MODEL and value not in flag.values:
        found.append(f"{flag.to}={json.dumps({'method': 'draft_model', 'model': value})}")
    elif not flag.to or (flag.values and flag.instead and value not in flag.values):
        raise ForeignFlagError(f"{name}{f' {value}' if flag.takes else ''}: {flag.instead}")
    elif flag.to == MODEL:
        command.append(value)
    else:
        found.append(f"{flag.to}={flag.values.get(value, value)}" if flag.takes else flag.to)
