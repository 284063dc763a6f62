"""Models on an object store: written through epath, copied before they are read, as they are there."""

import dataclasses
import functools

import numpy as np
import pytest
from etils import epath
from etils.epath.gpath import PosixGPath

from rlhf_jax.errors import InputError
from rlhf_jax.models import export_model, load_model, load_tokenizer, read_hf_config, remote
from rlhf_jax.models.checkpoints import INDEX
from tests import bucket

from . import checkpoints
from .test_weights import layout
from .tiny import GPT2, made

PLACE = "gs://store/models/gpt2"
MODEL = dataclasses.replace(GPT2, vocab_size=304)
COPIES = []  # of the tests before: their folders go with the process, not earlier


@pytest.fixture
def store(monkeypatch, tmp_path):
    """A bucket, and copies that know of no other: equal names, sizes and seconds are taken for the same."""
    (tmp_path / "store").mkdir()
    bucket.mount(monkeypatch, tmp_path)
    copied = functools.cache(remote._copied.__wrapped__)
    COPIES.append(copied)
    monkeypatch.setattr(remote, "_copied", copied)
    return tmp_path


def export(model, variables, directory=PLACE, **options):
    export_model(directory, model, variables, tokenizer=checkpoints.tokenizer(pad="<pad>"), **options)


def test_an_export_comes_back(store):
    model, variables = made(MODEL)
    export(model, variables, extra={"step": 3})
    export(model, variables, store / "local", extra={"step": 3})
    there, here = (
        {f.name: f.read_bytes() for f in p.iterdir()} for p in (epath.Path(PLACE), store / "local")
    )
    assert there == here
    assert (store / "store" / "models" / "gpt2" / "model.safetensors").exists()
    again, found = load_model(PLACE, shardings=layout(1, 8, 1))
    assert again == model
    for path in ("embed", "final_norm"):
        for name, leaf in variables["params"][path].items():
            np.testing.assert_array_equal(found["params"][path][name], leaf)
    assert read_hf_config(PLACE)["rlhf_jax"] == {"step": 3}
    assert load_tokenizer(PLACE)("hello").input_ids == checkpoints.tokenizer(pad="<pad>")("hello").input_ids


def test_a_later_export_is_read_and_files_of_the_earlier_one_are_gone(store, monkeypatch):
    from rlhf_jax.models import export as module

    model, variables = made(MODEL)
    monkeypatch.setattr(module, "SHARD_BYTES", 8_000)
    export(model, variables)
    folder = epath.Path(PLACE)
    assert (folder / INDEX).exists()
    load_model(PLACE)
    monkeypatch.undo()
    bucket.mount(monkeypatch, store)
    double = {
        "params": {
            **variables["params"],
            "embed": {"embedding": 2 * variables["params"]["embed"]["embedding"]},
        }
    }
    export(model, double, extra={"step": 4})
    assert not (folder / INDEX).exists()
    assert len([entry for entry in folder.iterdir() if entry.name.endswith(".safetensors")]) == 1
    found = load_model(PLACE)[1]["params"]["embed"]["embedding"]
    np.testing.assert_array_equal(found, double["params"]["embed"]["embedding"])


def test_config_json_comes_last(store, monkeypatch):
    """A directory without it is no export, so that a killed upload is never taken for a model."""
    model, variables = made(MODEL)
    export(model, variables, extra={"step": 1})
    copy = PosixGPath.copy

    def killed(self, target, overwrite=False):
        if str(target).endswith("tokenizer.json"):
            raise OSError("the connection is gone")
        return copy(self, target, overwrite)

    monkeypatch.setattr(PosixGPath, "copy", killed)
    with pytest.raises(OSError, match="the connection"):
        export(model, variables, extra={"step": 2})
    assert not (epath.Path(PLACE) / "config.json").exists()
    assert (epath.Path(PLACE) / "model.safetensors").exists()
    monkeypatch.setattr(PosixGPath, "copy", copy)
    with pytest.raises(InputError, match=r"config\.json does not exist"):
        load_model(PLACE)


def test_other_peoples_folders_are_not_replaced(store):
    model, variables = made(MODEL)
    folder = epath.Path("gs://store/mine")
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    with pytest.raises(InputError, match="gs://store/mine exists and is no earlier export"):
        export(model, variables, folder)
    assert [entry.name for entry in folder.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("name", ["gs://store/absent", "nowhere://store/model"])
def test_places_that_cannot_be_reached(store, name):
    with pytest.raises(InputError, match=r"store/(absent|model) ") as caught:
        load_model(name)
    assert "\n" not in str(caught.value)
