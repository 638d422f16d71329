"""Writes a Llama of random weights as a Hugging Face folder that a server loads: `python -m bench.random_folder OUT`.

In bfloat16 the weights lie in shards, in INT8 in the form that `millrace quantize` writes. The tokenizer has as many
tokens as the model, all of them letters or bytes; what the model says means nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from bench.random_model import SHAPES, llama, random_model
from serving.quantization.folder import config_from_spec, stored_tensors, write_model

THETA = 500000.0  # base of the rope, as `bench.random_model.llama` has it
SHARD_BYTES = 4 << 30
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # the last tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INDEX = "model.safetensors.index.json"


def write_folder(out: Path, shape: str, weights: str, device: torch.device, shard_bytes: int = SHARD_BYTES) -> None:
    """Make the model on `device` and write it to `out`. `weights` is bfloat16, or quantized: INT8 in the layers
    in which `millrace quantize` writes it.

    Raises ValueError where `out` has something in it, or the shape has fewer tokens than there are bytes.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty")
    sizes = SHAPES[shape]
    out.mkdir(parents=True, exist_ok=True)
    write_tokenizer(out, sizes["vocab_size"], sizes["max_position"])
    spec = llama(**sizes)
    config = config_from_spec(spec, THETA) | {"bos_token_id": sizes["vocab_size"] - 2}
    config["eos_token_id"] = sizes["vocab_size"] - 1
    model = random_model(spec, weights, torch.bfloat16, device)
    if weights == "quantized":
        write_model(model, config, out)
        return
    write_shards(stored_tensors(model), out, shard_bytes)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}, indent=2) + "\n")


def write_shards(tensors: Mapping[str, Tensor], out: Path, most: int) -> None:
    """Files of up to `most` bytes of tensors (one tensor at least), and the index that names each tensor's file."""
    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if shards[-1] and held + tensor.nbytes > most:
            shards.append({})
            held = 0
        shards[-1][name] = tensor
        held += tensor.nbytes
    files = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, out / file, metadata={"format": "pt"})
    named = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    total = sum(tensor.nbytes for tensor in tensors.values())
    (out / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": named}, indent=2) + "\n")


def words() -> Iterator[str]:
    """Of two, then three, then four letters; each is its own beginning, a word before it, and one letter more."""
    for length in (2, 3, 4):
        yield from map("".join, product(ascii_lowercase, repeat=length))


def write_tokenizer(out: Path, vocab_size: int, max_position: int) -> None:
    """A byte-level BPE of exactly `vocab_size` tokens: bytes, words of letters, and three special ones at the end."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    count = vocab_size - len(letters) - len(SPECIAL)
    if count < 0:
        raise ValueError(f"a vocabulary of {vocab_size} has no room for {len(letters)} bytes and {len(SPECIAL)} more")
    made = list(islice(words(), count))
    if len(made) < count:
        raise ValueError(f"a vocabulary of {vocab_size} is larger than words of four letters make it")
    vocab = {token: number for number, token in enumerate((*letters, *made))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(word[:-1], word[-1]) for word in made]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    assert tokenizer.get_vocab_size() == vocab_size
    tokenizer.save(str(out / "tokenizer.json"))
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SPECIAL[1],
        "eos_token": SPECIAL[2],
        "pad_token": SPECIAL[0],
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_position,
        "chat_template": CHAT_TEMPLATE,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.random_folder", description=__doc__)
    parser.add_argument("out", type=Path, help="the folder to write; it must not exist, or be empty")
    parser.add_argument("--shape", choices=SHAPES, default="8b", help="(8b)")
    parser.add_argument("--weights", choices=("bfloat16", "quantized"), default="bfloat16", help="(bfloat16)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where it is made")
    parser.add_argument("--seed", type=int, default=0, help="of the weights (0)")
    parser.add_argument("--json", type=Path, help="write bytes and seconds there, too")
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    began = time.perf_counter()
    try:
        write_folder(options.out, options.shape, options.weights, torch.device(options.device))
    except ValueError as error:
        print(f"random_folder: {error}", file=sys.stderr)
        return 2
    took, size = time.perf_counter() - began, sum(file.stat().st_size for file in options.out.iterdir())
    print(f"wrote {options.out} ({size / 1e9:.2f} GB) in {took:.1f} s")
    if options.json is not None:
        options.json.write_text(json.dumps({"bytes": size, "seconds": took}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
