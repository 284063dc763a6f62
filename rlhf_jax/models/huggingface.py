"""From a Hugging Face directory or hub name to a model, its tokenizer and its end-of-sequence ids."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

from etils import epath

from rlhf_jax.errors import InputError, first_line
from rlhf_jax.models.config_json import config_from_json, family_of
from rlhf_jax.models.configs import EncoderConfig
from rlhf_jax.models.heads import DECODER_HEADS
from rlhf_jax.models.parameters import anywhere, build_model
from rlhf_jax.models.remote import is_remote, local_copy
from rlhf_jax.models.weights import StoredWeights

# No pickles, no code, no folders of other formats.
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")


def load_model(
    name_or_dir,
    *,
    head: str = "lm",
    dtype: Any = "float32",
    seed: int = 0,
    head_required: bool = False,
    shardings: Callable[[Any], Any] | None = None,
):
    """A model and its weights from a Hugging Face directory or hub name.

    Args:
      name_or_dir: a directory, local or gs://, with config.json and safetensors; otherwise a name on the
        Hugging Face hub.
      head: lm, value or score. A value or score head that the checkpoint lacks is made fresh, with a warning.
      dtype: type of the computation, float32 or bfloat16. Parameters are always float32.
      seed: of the fresh head.
      head_required: refuses a checkpoint that lacks the head.
      shardings: model -> tree of jax.sharding.Sharding, where each parameter is read to; each device's part
        alone is read for it. None: all of them whole, on the default device.
    Returns:
      (model, {"params": tree}), layers stacked on a leading axis.
    """
    model, weights = open_model(name_or_dir, head=head, dtype=dtype, seed=seed, head_required=head_required)
    return model, {"params": weights.read(shardings(model) if shardings else anywhere(weights.shapes))}


def open_model(
    name_or_dir, *, head: str, dtype: Any, seed: int = 0, head_required: bool = False
) -> tuple[Any, StoredWeights]:
    """As `load_model`, but the files are only checked by their headers; the weights are read when needed."""
    if head not in DECODER_HEADS:
        raise InputError(f"head {head!r} is unknown; use one of {', '.join(DECODER_HEADS)}")
    directory = model_directory(name_or_dir)
    where = str(directory / "config.json")
    hf = read_hf_config(directory)
    config, family = config_from_json(hf, where), family_of(hf, where)
    if isinstance(config, EncoderConfig) and head not in family.architectures:
        kind = f"an encoder ({family.model_type}), which sees the future"
        raise InputError(f"{name_or_dir} is {kind}: it has no {head!r} head; use a decoder")
    model = build_model(config, head=head, dtype=dtype)
    weights = StoredWeights(directory, family, model, seed, head_required)
    weights.check()
    return model, weights


def model_directory(name_or_dir) -> pathlib.Path:
    """The directory itself, a copy of a remote one, or that of the hub's snapshot of this name."""
    name = os.fspath(name_or_dir)
    if is_remote(name):
        return local_copy(name, HUB_FILES)
    path = pathlib.Path(name).expanduser()
    if name and path.is_dir():
        return path
    if not name or path.is_file() or path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise InputError(f"{name!r} is not a directory; give one with config.json and model.safetensors")
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError

    try:
        found = huggingface_hub.snapshot_download(
            name, allow_patterns=list(HUB_FILES), ignore_patterns=["*/*"]
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = first_line(error)
        raise InputError(
            f"{name!r} is neither a directory nor a model that the hub gives: {reason}"
        ) from error
    return pathlib.Path(found)


def read_hf_config(name_or_dir) -> dict[str, Any]:
    """config.json, whose key `rlhf_jax` holds what `export_model` was given as extra."""
    name = os.fspath(name_or_dir)
    path = (epath.Path(name) if is_remote(name) else model_directory(name)) / "config.json"
    if not path.exists():
        raise InputError(f"{path} does not exist; give a directory with config.json and model.safetensors")
    return _read_json(path)


def load_tokenizer(name_or_dir):
    """The tokenizer of a directory or hub name. Code from the checkpoint is never run.

    Raises:
      InputError: there is none, or it has more ids than the model beside it has embeddings.
    """
    from transformers import AutoTokenizer

    directory = model_directory(name_or_dir)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), trust_remote_code=False)
        tokenizer.decode(tokenizer.encode("a word"))  # some settings are looked at only in use
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = first_line(error).rstrip(":")
        raise InputError(
            f"{directory} has no tokenizer that can be read ({reason}); save tokenizer.json beside the model"
        ) from error
    ids, rows = 1 + max(tokenizer.get_vocab().values(), default=-1), _vocab_size(directory)
    if rows is not None and ids > rows:
        raise InputError(
            f"{directory}: the tokenizer has ids up to {ids - 1} and the model vocab_size={rows} embeddings; "
            f"resize the model to {ids} or give it its own tokenizer"
        )
    return tokenizer


def _vocab_size(directory: pathlib.Path) -> int | None:
    rows = read_hf_config(directory).get("vocab_size") if (directory / "config.json").is_file() else None
    return rows if isinstance(rows, int) else None


def eos_token_ids(name_or_dir, tokenizer) -> tuple[int, ...]:
    """Ids that end a response: the tokenizer's EOS, then those of generation_config.json (or config.json)."""
    directory = model_directory(name_or_dir)
    path = directory / "generation_config.json"
    listed = _read_json(path).get("eos_token_id") if path.is_file() else None
    if listed is None:
        listed = read_hf_config(directory).get("eos_token_id")
    ids = [tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])]
    if not all(id is None or (type(id) is int and id >= 0) for id in ids):
        raise InputError(
            f"{name_or_dir}: eos_token_id={listed!r} is neither a token id nor a list of them; mend it in "
            "generation_config.json or config.json"
        )
    found = tuple(dict.fromkeys(id for id in ids if id is not None))
    if not found:
        raise InputError(
            f"{name_or_dir}: neither tokenizer nor generation_config.json names an end-of-sequence token; "
            "set eos_token in tokenizer_config.json"
        )
    rows = _vocab_size(directory)
    if rows is not None and max(found) >= rows:
        raise InputError(
            f"{name_or_dir}: end-of-sequence id {max(found)} is beyond the model's vocab_size={rows}; mend "
            "eos_token_id in generation_config.json or config.json"
        )
    return found


def _read_json(path: pathlib.Path | epath.Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # of JSON or of UTF-8
        raise InputError(f"{path} is not JSON ({error}); fetch or save the model again") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror or error})") from error
    if not isinstance(value, dict):
        raise InputError(
            f"{path} holds {type(value).__name__}, expected a JSON object; fetch or save the model again"
        )
    return value
