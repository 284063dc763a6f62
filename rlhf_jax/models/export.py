"""A model as a Hugging Face directory that `transformers` loads with equal outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pathlib
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from etils import epath
from safetensors.numpy import save_file

from rlhf_jax.errors import InputError
from rlhf_jax.models.checkpoints import INDEX, stored_tensors
from rlhf_jax.models.config_json import config_to_json
from rlhf_jax.models.families import FAMILIES, Family
from rlhf_jax.models.parameters import stack_layers
from rlhf_jax.sharding.processes import barrier, is_primary

PAD = "<|pad|>"
SHARD_BYTES = 5_000_000_000


def export_model(
    directory,
    model,
    variables: Mapping,
    *,
    tokenizer,
    extra: Mapping[str, Any] | None = None,
    eos_ids: Sequence[int] | None = None,
) -> None:
    """Writes config.json, safetensors, tokenizer and generation_config.json; all of them or nothing.

    With several processes all call it: each tensor is gathered from the devices where it lies, and the first
    process writes. On an object store, which renames nothing, config.json comes last: an export without it
    is none.

    `transformers` loads an lm model as AutoModelForCausalLM, a value or score model as
    AutoModelForSequenceClassification with one label. It reads a causal score at the last id that is not the
    pad id, so such a model needs a pad id that ends no text: where the tokenizer has none, a copy of it gets
    a new `<|pad|>`, and the embedding a row of zeros.

    Args:
      directory: made anew; an earlier export there is replaced.
      tokenizer: of `transformers`; it goes with the model, chat template included.
      extra: kept under `rlhf_jax` in config.json (`read_hf_config` gives it back).
      eos_ids: all ids that end a response; None: the tokenizer's EOS.
    """
    target = epath.Path(directory).expanduser()
    _check_target(target)
    config, params = model.config, variables["params"]
    if "layers" not in params:
        params = stack_layers(params)
    family = FAMILIES[config.family]
    if eos_ids is None:
        eos_ids = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    if model.head != "lm" and "lm" in family.architectures:
        tokenizer, params = _with_own_pad(tokenizer, eos_ids, params)
        config = dataclasses.replace(config, vocab_size=params["embed"]["embedding"].shape[0])
    hf = config_to_json(config, model.head)
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": list(eos_ids) if len(eos_ids) > 1 else next(iter(eos_ids), None),
        "pad_token_id": tokenizer.pad_token_id,
    }
    hf |= ids | {"dtype": params["embed"]["embedding"].dtype.name}
    if model.head != "lm":
        hf |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    hf["rlhf_jax"] = dict(extra or {})
    files = {"config.json": hf}
    if model.head == "lm":
        files["generation_config.json"] = {k: v for k, v in ids.items() if v is not None}
    if is_primary():
        with _replacement(target) as temporary:
            _write_tensors(temporary, params, family)
            for name, value in files.items():
                _write_json(temporary / name, value)
            tokenizer.save_pretrained(str(temporary))
    else:
        for _, _, tensor in stored_tensors(dict(params), family):
            tensor()
    barrier(f"export of {target}")


def _with_own_pad(tokenizer, eos_ids: Sequence[int], params: Mapping):
    """(tokenizer, params) with a pad id that is none of the EOS ids and has a row in the embedding."""
    if tokenizer.pad_token_id is not None and tokenizer.pad_token_id not in {
        *eos_ids,
        tokenizer.eos_token_id,
    }:
        return tokenizer, params
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_special_tokens({"pad_token": PAD})
    embedding = params["embed"]["embedding"]
    rows = max(0, tokenizer.pad_token_id + 1 - embedding.shape[0])
    embedding = jnp.pad(embedding, ((0, rows), (0, 0)))
    return tokenizer, {**params, "embed": {"embedding": embedding}}


def _write_tensors(directory: pathlib.Path, params: Mapping, family: Family) -> None:
    shards: list[list] = [[]]
    size = 0
    for name, count, tensor in stored_tensors(dict(params), family):
        if shards[-1] and size + count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append((name, tensor))
        size += count
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for file, shard in zip(files, shards, strict=True):
        save_file({name: tensor() for name, tensor in shard}, directory / file, metadata={"format": "pt"})
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards, strict=True) for name, _ in shard}
        total = sum(count for _, count, _ in stored_tensors(dict(params), family))
        _write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": where})


def _write_json(path: pathlib.Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")


def _check_target(target: epath.Path) -> None:
    """Refuses to replace anything but an empty directory or an earlier export."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    try:
        ours = "rlhf_jax" in json.loads((target / "config.json").read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        ours = False
    if not ours:
        raise InputError(f"{target} exists and is no earlier export; name another directory to export to")


@contextlib.contextmanager
def _replacement(target: epath.Path) -> Iterator[pathlib.Path]:
    """A folder to write to; it takes the place of `target` at the end, unless the writing fails."""
    remote = "://" in str(target)
    name = f".{target.name}.{uuid.uuid4().hex[:8]}"
    temporary = pathlib.Path(tempfile.gettempdir() if remote else target.parent) / name
    temporary.mkdir(parents=True)
    try:
        yield temporary
        if remote:
            _upload(temporary, target)
        else:
            _replace(temporary, pathlib.Path(target))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _upload(source: pathlib.Path, target: epath.Path) -> None:
    """Copies the files, config.json last; an earlier export there ends when the copying begins."""
    (target / "config.json").unlink(missing_ok=True)
    target.mkdir(parents=True, exist_ok=True)
    names = sorted((path.name for path in source.iterdir()), key=lambda name: (name == "config.json", name))
    for entry in list(target.iterdir()):
        if entry.name not in names:
            entry.unlink()
    for name in names:
        epath.Path(source / name).copy(target / name, overwrite=True)


def _replace(temporary: pathlib.Path, target: pathlib.Path) -> None:
    if target.exists():
        old = temporary.with_name(temporary.name + ".old")
        target.rename(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)
