"""What starting a worker's model takes at most is bounded by its weights: no whole model lies beside them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from serving.kernels import cpu
from serving.loader import quantize_at_load
from serving.loader.loading import load
from tests.tiny import tiny_llama

PROGRAM = """
import sys
from pathlib import Path
from kvcache.memory.device import DeviceKV
from serving.config import EngineConfig
from serving.forward.choose import make_forward
from serving.loader import quantize_at_load
from serving.loader.loading import load
from serving.malloc import give_back_freed_memory

def status(name):
    return 1024 * int(Path("/proc/self/status").read_text().split(name + ":")[1].split()[0])

quantize_at_load.cache_folder = lambda: Path(sys.argv[1])
quantize_at_load.calibration_tokens = lambda path, longest: [list(range(3, 43))]
give_back_freed_memory()
for path in sys.argv[2:]:  # the first brings in all that any model needs
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before = status("VmRSS")
    model = load(Path(path), "bfloat16", quantization="int8")
    planes = DeviceKV(model.spec.kv_layers(model.dtype), 1, 16).planes
    forward = make_forward(model, planes, EngineConfig(kernels="compiled", threads=1), 64, releases=True)
    peak, after = status("VmHWM") - before, status("VmRSS") - before
print(peak, after)
"""
LAYERS, HIDDEN = 16, 512
PART = HIDDEN**2  # a layer's weights: qkv has two of such parts, o one, gate_up four and down two


@pytest.mark.skipif(cpu.shared_library() is None, reason="the kernels cannot be built here")
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="VmHWM is told by Linux alone")
def test_a_start_takes_less_than_twice_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_llama(tmp_path / "model", layers=LAYERS, hidden=HIDDEN, heads=8, kv_heads=4)
    small = tiny_llama(tmp_path / "small", layers=2)
    weights = LAYERS * 9 * PART
    monkeypatch.setattr(quantize_at_load, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr(quantize_at_load, "calibration_tokens", lambda path, longest: [list(range(3, 43))])
    load(path, "bfloat16", quantization="int8")  # the very first start seeks scales, with the whole model
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(small), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    peak, after = (int(word) / weights for word in done.stdout.split())
    assert after < 1.3, f"{after:.2f} times the weights stay: what loading took is given back"
    assert peak < 2.0, f"{peak:.2f} times the weights"
