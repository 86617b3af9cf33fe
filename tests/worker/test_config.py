"""Settings that cannot be meant are refused with what to do instead."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from octavo.runtime.options.flags import config_of, options_of
from octavo.runtime.transport.curve_keys import ClientKeys
from octavo.runtime.transport.endpoints import EndpointError
from octavo.worker.config import WorkerConfig, default_worker_id
from octavo.worker.fake.faults import parse_faults
from octavo.worker.model_settings import ConfigError, ModelSettings, parse_kv_layout, parse_windows


def configure(**changes: Any) -> WorkerConfig:
    settings: dict[str, Any] = {
        "model": "m",
        "load_format": "auto",
        "model_impl": "auto",
        "endpoint": "ipc:///run/octavo/workers.sock",
        "worker_id": "w0",
        "health_address": "127.0.0.1:0",
        "device": "cpu",
        "dtype": "float32",
        "quantization": "none",
        "numerics": "default",
        "block_size": 16,
        "kv_cache_memory": None,
        "num_blocks": None,
        "swap_memory": None,
        "num_cpu_blocks": None,
        "max_model_len": None,
        "threads": None,
        "insecure_tcp": False,
        "calibrate": True,
        "kv_cache_dtype": "auto",
        "gpu_memory_utilization": 0.9,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
        "cuda_graphs": True,
        "fake_step_ms": 0.0,
        "fake_eos_probability": 0.0,
        "fake_windows": (0,),
    }
    return WorkerConfig(**settings | changes)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"worker_id": ""}, "must be 1 to 128"),
        ({"worker_id": "../w"}, "must be 1 to 128"),
        ({"block_size": 0}, "not in 1 to 256"),
        ({"block_size": 257}, "not in 1 to 256"),
        ({"num_blocks": 0}, "at least 1"),
        ({"kv_cache_memory": 0}, "at least 1"),
        ({"kv_cache_dtype": "fp8"}, "fp8 is for --device cuda; on cpu, .* auto, bfloat16, float32, int8"),
        ({"device": "cuda", "kv_cache_dtype": "int8"}, "int8 is for --device cpu; on cuda, .* takes auto, fp8"),
        ({"device": "fake", "kv_cache_dtype": "int8"}, "int8 is for --device cpu; on fake, .* takes auto"),
        ({"swap_memory": -1}, "swap_memory is -1; it must be at least 0"),
        ({"num_cpu_blocks": -1}, "at least 0"),
        ({"threads": -1}, "at least 1"),
        ({"kv_mirror": True}, "name a directory with --kv-disk"),
        ({"kv_disk": Path("kv"), "swap_memory": 0}, "give --swap-memory more than 0"),
        ({"kv_disk": Path("kv"), "swap_memory": 1, "num_cpu_blocks": 0}, "give --swap-memory more than 0"),
        ({"kv_disk": Path("kv"), "tp": 2}, "keep no KV blocks on a disk yet; drop --kv-disk, or --tp"),
        ({"max_model_len": 0}, "at least 1"),
        ({"device": "fake", "kv_cache_memory": 1 << 20}, "give the number of blocks"),
        ({"device": "fake", "swap_memory": 1 << 20}, "give the number of blocks"),
        ({"device": "cuda", "quantization": "q8_0"}, "q8_0 is for --device cpu; on cuda it takes q4_0, q4_1"),
        ({"device": "fake", "quantization": "q4_0"}, "--quantization q4_0 is for cpu and cuda; drop it on fake"),
        ({"device": "cpu", "attention_backend": "triton"}, "--attention-backend triton is for --device cuda; drop it"),
        ({"kv_layout": -1}, "kv_layout is -1; it must be at least 0"),
        ({"device": "fake", "kv_layout": 1}, "no layers that could lie apart; drop --kv-layout"),
        ({"fake_step_ms": 1.0}, "mean nothing on cpu"),
        ({"fake_windows": (0, 64)}, "mean nothing on cpu"),
        ({"fake_faults": parse_faults("die=5")}, "mean nothing on cpu"),
        ({"device": "fake", "fake_windows": ()}, "one KV group or more"),
        ({"device": "fake", "fake_windows": (0, -1)}, "one KV group or more"),
        ({"device": "fake", "fake_eos_probability": 1.5}, "lies in 0 to 1"),
        ({"device": "fake", "fake_step_ms": float("nan")}, "0 ms or more"),
    ],
)
def test_a_setting_that_cannot_be_meant_is_refused(changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        configure(**changes)


@pytest.mark.parametrize(("text", "layers"), [("all", 0), ("1", 1), ("12", 12)])
def test_a_layout_is_all_layers_together_or_a_number_of_them(text: str, layers: int) -> None:
    assert parse_kv_layout(text) == layers


@pytest.mark.parametrize("text", ["", "0", "-1", "some", "2,2"])
def test_what_is_no_layout_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no layout of KV blocks; write all, or a number of layers"):
        parse_kv_layout(text)


def test_an_address_beyond_this_machine_needs_the_flag() -> None:
    with pytest.raises(EndpointError, match="--insecure-tcp"):
        configure(endpoint="tcp://10.0.0.1:7000")
    assert configure(endpoint="tcp://10.0.0.1:7000", insecure_tcp=True).endpoint == "tcp://10.0.0.1:7000"


def test_keys_open_an_address_beyond_this_machine(caplog: pytest.LogCaptureFixture) -> None:
    keys = ClientKeys(b"public", b"secret", b"scheduler")
    assert configure(endpoint="tcp://10.0.0.1:7000", curve_keys=keys).curve_keys == keys
    assert not caplog.records


def test_an_exact_number_of_blocks_wins_over_memory() -> None:
    config = configure(device="fake", kv_cache_memory=1, num_blocks=8, swap_memory=1, num_cpu_blocks=8)
    assert (config.num_blocks, config.num_cpu_blocks) == (8, 8)


def test_there_may_be_nothing_to_swap_to() -> None:
    assert configure(swap_memory=0).swap_memory == 0
    assert configure(num_cpu_blocks=0).num_cpu_blocks == 0


def test_without_options_the_settings_of_a_model_have_their_own_defaults() -> None:
    found: list[ModelSettings] = []

    @click.command()
    @options_of(ModelSettings)
    def command(**parsed: Any) -> None:
        found.append(config_of(ModelSettings, parsed))

    result = CliRunner(env={"OCTAVO_MODEL": None}).invoke(command, [])
    assert (result.output, found) == ("", [ModelSettings()])


@pytest.mark.parametrize(("text", "windows"), [("0", (0,)), ("0,128", (0, 128)), (" 4 , 0,4", (4, 0, 4))])
def test_windows_are_read_in_the_order_of_their_groups(text: str, windows: tuple[int, ...]) -> None:
    assert parse_windows(text) == windows


@pytest.mark.parametrize("text", ["", "0,", "-1", "a", "1;2"])
def test_other_lists_of_windows_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no list of windows"):
        parse_windows(text)


@pytest.mark.parametrize("host", ["box", "-odd_häst-", "", "x" * 300])
def test_any_host_name_gives_a_worker_id(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    assert configure(worker_id=default_worker_id())
