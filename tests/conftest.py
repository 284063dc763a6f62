"""Eight virtual devices, strict ranks, and the switches for the longer suites."""

import gc
import os
import pathlib

# Less optimised programs compile in half the time, and tests compile more than they run.
FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
for offline in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ.setdefault(offline, "1")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")

SHARED = pathlib.Path(os.environ.get("RLHF_JAX_SHARED", pathlib.Path(__file__).parents[2] / "shared"))

MAPS, MOST_MAPS = pathlib.Path("/proc/self/maps"), 20_000  # of 65,530 (vm.max_map_count)


def pytest_addoption(parser):
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_collection_modifyitems(config, items):
    for name in ("slow", "long"):
        if not config.getoption(f"--{name}"):
            for item in items:
                if name in item.keywords:
                    item.add_marker(pytest.mark.skip(reason=f"needs --{name}"))


@pytest.fixture(scope="module", autouse=True)
def forgotten_programs():
    """Compiled programs are memory maps, and a process that has as many as Linux allows is aborted."""
    yield
    if MAPS.exists() and MAPS.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="session")
def hh_pairs():
    """The folder of HH-RLHF harmless-base pairs."""
    folder = SHARED / "data" / "hh-rlhf" / "harmless-base"
    if not folder.exists():
        pytest.skip(f"{folder} is missing")
    return folder


@pytest.fixture(scope="session")
def real_models():
    """The folder of real checkpoints (RLHF_JAX_MODELS), made by the script that comes with the data."""
    folder = pathlib.Path(os.environ.get("RLHF_JAX_MODELS", "/tmp/models"))
    if not (folder / "minilm-l6" / "model.safetensors").exists():
        pytest.skip(f"no models in {folder}; set RLHF_JAX_MODELS")
    return folder
