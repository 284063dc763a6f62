"""config.json to our configs and back. What the modules do not implement is refused by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.errors import InputError
from rlhf_jax.models.configs import EncoderConfig, Rope, TransformerConfig
from rlhf_jax.models.families import FAMILIES, REQUIRED, Family
from rlhf_jax.models.layers import ACTIVATIONS

ROPE_KINDS = ("default", "linear", "llama3")
LARGEST = 2**31  # of numbers, excluded: neither infinity nor what no array has room for


def family_of(hf: Mapping[str, Any], where: str) -> Family:
    """The table entry that config.json asks for."""
    family = FAMILIES.get(str(hf.get("model_type")))
    if family is None:
        named = names_in(hf, "architectures", where)
        by_name = {name: entry for entry in FAMILIES.values() for name in entry.architectures.values()}
        family = next((by_name[name] for name in named if name in by_name and not hf.get("model_type")), None)
    if family is None:
        asked = ", ".join(named) or f"model_type {hf.get('model_type')!r}"
        known = "; ".join(
            f"{name} ({', '.join(dict.fromkeys(f.architectures.values()))})" for name, f in FAMILIES.items()
        )
        raise InputError(f"{where}: architecture {asked} is not supported; use one of: {known}")
    return family


def names_in(hf: Mapping[str, Any], key: str, where: str) -> list[str]:
    """A list of texts in config.json; empty where the key is missing or null."""
    names = hf.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise InputError(f"{where}: {key}={names!r} is not a list of names; fetch or save the model again")
    return names


def config_from_json(hf: Mapping[str, Any], where: str) -> TransformerConfig | EncoderConfig:
    """The config of the model that config.json describes.

    Args:
      hf: config.json.   where: the file's name, for error messages.
    Raises:
      InputError: something is missing, malformed or not implemented.
    """
    family = family_of(hf, where)
    _refuse(hf, family, where)
    types = {field.name: field.type for field in dataclasses.fields(family.config)}
    fields: dict[str, Any] = {}
    for key in family.keys:
        value = hf.get(key.name)
        if value is None:
            if key.default is REQUIRED:
                raise InputError(f"{where} has no {key.name!r}, which a {family.model_type} model needs")
            value = key.default(fields) if callable(key.default) else key.default
        least = 0 if key.field == "token_types" else 1
        fields[key.field] = _typed(value, str(types[key.field]), f"{where}: {key.name}", least)
    for name, derive in family.derived.items():
        fields[name] = derive(fields)
    if family.rotary:
        fields["rope"] = _rope(hf, fields["max_positions"], where)
    try:
        return family.config(family=family.model_type, **fields, **family.fixed)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def config_to_json(config: TransformerConfig | EncoderConfig, head: str) -> dict[str, Any]:
    """config.json for a model with this head; the inverse of `config_from_json`."""
    family = FAMILIES[config.family]
    hf: dict[str, Any] = {"architectures": [family.architectures[head]], "model_type": family.model_type}
    hf |= {key.name: getattr(config, key.field) for key in family.keys}
    rope = getattr(config, "rope", None)
    if family.rotary and rope is not None:
        hf["rope_theta"] = rope.theta
        if rope.kind != "default":
            scaling = {"rope_type": rope.kind, "factor": rope.factor}
            if rope.kind == "llama3":
                scaling |= {
                    "low_freq_factor": rope.low_freq_factor,
                    "high_freq_factor": rope.high_freq_factor,
                    "original_max_position_embeddings": rope.original_positions,
                }
            hf["rope_scaling"] = scaling
    return hf


def _typed(value: Any, kind: str, what: str, least: int = 1) -> Any:
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < LARGEST
    if kind == "float" and number:
        return float(value)
    if kind == "int" and number and value == int(value) and value >= least:
        return int(value)
    if kind == "bool" and isinstance(value, bool):
        return value
    if kind == "str" and isinstance(value, str) and value in ACTIVATIONS:  # the only text among the keys
        return value
    wanted = {"float": "a number", "int": f"a whole number of at least {least}", "bool": "true or false"}
    raise InputError(
        f"{what}={value!r} is not supported; use {wanted.get(kind, 'one of ' + ', '.join(ACTIVATIONS))}"
    )


def _refuse(hf: Mapping[str, Any], family: Family, where: str) -> None:
    for name, allowed in family.only.items():
        if hf.get(name) is not None and hf[name] != allowed:
            raise InputError(f"{where}: {name}={hf[name]!r} is not supported; only {allowed!r} is")
    if hf.get("sliding_window") is not None and hf.get("use_sliding_window", True):
        raise InputError(
            f"{where}: sliding_window={hf['sliding_window']!r} is not supported; only full attention is"
        )
    other = sorted(set(names_in(hf, "layer_types", where)) - {"full_attention"})
    if other:
        raise InputError(f"{where}: layer_types {', '.join(other)} are not supported; only full_attention is")
    if hf.get("quantization_config") is not None:
        raise InputError(
            f"{where}: quantized weights are not supported; use the float checkpoint of this model"
        )


def _rope(hf: Mapping[str, Any], max_positions: int, where: str) -> Rope:
    given = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    if not isinstance(given, Mapping) or any(isinstance(value, Mapping) for value in given.values()):
        raise InputError(f"{where}: rope_parameters={given!r} is not supported; use one set for all layers")
    kind = given.get("rope_type", given.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise InputError(f"{where}: rope type {kind!r} is not supported; use one of {', '.join(ROPE_KINDS)}")
    partial = given.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise InputError(f"{where}: partial_rotary_factor={partial!r} is not supported; only 1.0 is")

    def number(name, default=REQUIRED):
        value = given.get(name)
        value = hf.get(name) if value is None else value
        if value is None and default is REQUIRED:
            raise InputError(f"{where}: rope type {kind} has no {name!r}, which it needs")
        value = _typed(default if value is None else value, "float", f"{where}: {name}")
        if value <= 0:
            raise InputError(f"{where}: {name}={value!r} must be positive")
        return value

    rope = Rope(theta=number("rope_theta", 10000.0), kind=kind)
    if kind == "default":
        return rope
    rope = dataclasses.replace(rope, factor=number("factor"))
    if kind == "linear":
        return rope
    return dataclasses.replace(
        rope,
        low_freq_factor=number("low_freq_factor"),
        high_freq_factor=number("high_freq_factor"),
        original_positions=int(number("original_max_position_embeddings", float(max_positions))),
    )
