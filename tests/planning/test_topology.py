"""Names of topologies: those at hand, wrong ones, and what is known of chips."""

import types

import jax
import pytest

from rlhf_jax.errors import InputError
from rlhf_jax.planning.topology import CHIPS, chip_of, devices_of, memory_of


@pytest.mark.parametrize("name", ["host", "cpu"])
def test_the_devices_at_hand(name):
    assert devices_of(name) == jax.devices()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "'' is none of v5e, v5p, v6e; use host, or chip:AxB"),
        ("hst", "did you mean host"),
        ("v5:2x2x2", "'v5' is none of v5e, v5p, v6e; did you mean v5p"),
        ("v5e", "v5e slices have 2 dimensions"),
        ("v5e:16", "v5e slices have 2 dimensions"),
        ("v5e:4x4x4", "v5e slices have 2 dimensions"),
        ("v5p:4x4", "v5p slices have 3 dimensions"),
        ("v5e:0x4", "v5e slices have 2 dimensions"),
        ("v5e:-4x4", "v5e slices have 2 dimensions"),
        ("v5e:4x 4", "v5e slices have 2 dimensions"),
        ("v5e:4x4\n", "v5e slices have 2 dimensions"),
        ("v6e:32x16", "v6e:32x16 has 512 chips, and v6e slices at most 256"),
    ],
)
def test_wrong_names(name, message):
    with pytest.raises(InputError, match=message):
        devices_of(name)


def test_without_the_library_the_message_says_how_to_get_it(monkeypatch):
    def missing(*args, **kwargs):
        raise RuntimeError("JAX TPU support not installed; cannot generate TPU topology.")

    monkeypatch.setattr(jax.experimental.topologies, "get_topology_desc", missing)
    with pytest.raises(InputError, match=r"v5e:4x4 needs libtpu; `pip install 'rlhf-jax\[tpu-aot\]'`"):
        devices_of("v5e:4x4")


def test_memory_and_peak_of_chips():
    v5e, other = (types.SimpleNamespace(device_kind=kind) for kind in ("TPU v5 lite", "NVIDIA H200"))
    other.memory_stats = lambda: {"bytes_limit": 7}
    assert chip_of(v5e) is CHIPS["v5e"]
    assert memory_of(v5e) == 15.75 * 2**30
    assert CHIPS["v5e"].peak_flops == 197e12
    assert memory_of(other) == 7
    assert memory_of(jax.devices()[0]) is None
