"""From YAML and `key=value` to a `Config`, and back. Precedence: defaults < YAML < command line.

Imports no jax, and OmegaConf only when a configuration is read. The checks across fields are in `checks.py`.
"""

from __future__ import annotations

import dataclasses
import io
import types
import typing
from collections.abc import Iterator
from typing import Any

from rlhf_jax.checks import check, check_devices, flat, nearest
from rlhf_jax.errors import InputError, first_line
from rlhf_jax.settings import Config

__all__ = [
    "check",
    "check_devices",
    "field_help",
    "flat",
    "from_dict",
    "load_config",
    "nearest",
    "to_dict",
    "to_yaml",
]

COMMAND_LINE = "on the command line"
WORDS_FOR_NONE = ("none", "None")
REFERENCE_HEAD = """\
# Configuration reference

Made from `rlhf_jax/settings.py` by `python -m rlhf_jax.config > docs/configuration.md`; a test checks that it
is current.

Precedence: the defaults below < the YAML file < `key=value` on the command line. `none` (or `null`) switches
an optional setting off. Unknown keys, values of another type, interpolations (`${...}`) and aliases (`*name`)
are refused.
`placement=FILE.yaml` reads the whole section from a file. `rlhf-jax config CONFIG.yaml` prints the resolved
result.
"""


def load_config(path: str | None, overrides: list[str]) -> Config:
    """Read the YAML file (none: defaults only), then apply each `key=value`."""
    given: dict = {}
    if path is not None:
        given = _settings_in(_read_yaml(path), f"in {path}")
    for override in overrides:
        _overlay(given, _settings_in(_parse_override(override), COMMAND_LINE))
    return _build(given)


def from_dict(given: dict, where: str = "in the configuration") -> Config:
    """A `Config` from nested dictionaries; what they leave out keeps its default."""
    return _build(_settings_in(given, where))


def to_dict(config: Config) -> dict:
    """Nested dictionaries of plain values."""
    return dataclasses.asdict(config)


def to_yaml(config: Config) -> str:
    """The resolved configuration; reading it again gives an equal one."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(to_dict(config)))


class FieldHelp(typing.NamedTuple):
    """One line of the reference: a leaf, or a section where `type` is empty."""

    name: str
    type: str
    default: str
    help: str


def field_help() -> list[FieldHelp]:
    """Every setting with its type, default and explanation, sections first named by a line of their own."""
    return list(_field_help(Config, ""))


def _field_help(kind: type, prefix: str) -> Iterator[FieldHelp]:
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        name, hint = prefix + field.name, hints[field.name]
        section = _section(hint)
        explanation = field.metadata.get("help", "")
        if section is None:
            yield FieldHelp(name, _type_name(hint), _plain(field.default), explanation)
        elif _optional(hint):
            inner = ", ".join(inner.name for inner in dataclasses.fields(section))
            yield FieldHelp(name, f"{{{inner}}} or none", "none", explanation)
        else:
            yield FieldHelp(name, "", "", (section.__doc__ or "").strip())
            yield from _field_help(section, name + ".")


def reference_page() -> str:
    """docs/configuration.md. Write it anew with `python -m rlhf_jax.config > docs/configuration.md`."""
    lines: list[str] = [REFERENCE_HEAD.rstrip()]
    for name, type_name, default, explanation in field_help():
        if not type_name:
            head = "##" if "." not in name else "###"
            lines += [
                "",
                f"{head} {name}",
                "",
                explanation,
                "",
                "| key | type | default | |",
                "|---|---|---|---|",
            ]
        else:
            shown = explanation.replace("|", "\\|")
            lines.append(f"| `{name}` | {type_name} | `{default}` | {shown} |")
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> str:
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _optional(hint: Any) -> bool:
    return isinstance(hint, types.UnionType) and type(None) in typing.get_args(hint)


def _section(hint: Any) -> type | None:
    """The dataclass that the hint names, optional or not; None for a plain value."""
    for kind in typing.get_args(hint) or (hint,):
        if dataclasses.is_dataclass(kind):
            return typing.cast(type, kind)
    return None


def _type_name(hint: Any) -> str:
    names = {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "none"}
    return " or ".join(names[kind] for kind in typing.get_args(hint) or (hint,))


def _expected(key: str) -> str:
    """What the leaf or section of this dotted name takes, in words."""
    kind: Any = Config
    for part in key.split("."):
        kind = typing.get_type_hints(_section(kind))[part]
    section = _section(kind)
    if section is None:
        return _type_name(kind)
    return f"a section of settings, such as {key}.{dataclasses.fields(section)[0].name}"


def _read_yaml(path: str) -> dict:
    from etils import epath

    try:
        text = epath.Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a configuration in YAML") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a directory; give the path of a configuration in YAML") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); save it as UTF-8") from None
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}") from None
    return _parse_yaml(text, path)


def _parse_yaml(text: str, where: str) -> dict:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, yaml.SafeLoader)):
            raise InputError(f"{where}: aliases (*name) are refused; write the value itself")
        read = OmegaConf.load(io.StringIO(text))
        plain = OmegaConf.to_container(read, resolve=False)
    except InputError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InputError(f"{where}{line}: not valid YAML: {error.problem or error.context}") from None
    except OSError:
        plain = text
    except Exception as error:
        if isinstance(error, OmegaConfBaseException) and "${" in text:
            raise InputError(
                f"{where}: interpolations (${{...}}) are refused; write the value itself"
            ) from None
        # Of many kinds: a day that no calendar has, a lone surrogate, a list as a key, nesting too deep.
        raise InputError(f"{where}: not valid YAML: {first_line(error)}") from None
    if not isinstance(plain, dict):
        raise InputError(f"{where}: found {_short(plain)} where sections such as `ppo:` were expected")
    return typing.cast(dict, plain)


def _parse_override(override: str) -> dict:
    key, equals, text = override.partition("=")
    if not equals or not key.strip():
        raise InputError(f"{override!r} {COMMAND_LINE}: expected key=value, such as ppo.iterations=50")
    where = f"{key} {COMMAND_LINE}"
    value = _parse_yaml("value: " + text, where).get("value") if text.strip() else None
    if key == "placement" and isinstance(value, str) and value.endswith((".yaml", ".yml")):
        plan = _read_yaml(value)
        return {"placement": plan.get("placement", plan)}
    nested: Any = value
    for part in reversed(key.strip().split(".")):
        nested = {part: nested}
    return nested


def _settings_in(given: dict, where: str) -> dict:
    """Refuse what no setting answers to; give back what is left, `none` as None."""
    return _walk(Config, given, "", where)


def _walk(kind: type, given: dict, prefix: str, where: str) -> dict:
    hints, kept = typing.get_type_hints(kind), {}
    for name, value in given.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise InputError(f"{key} {where} is no setting{_nearest_setting(key, prefix, hints)}")
        hint, section = hints[name], _section(hints[name])
        if _optional(hint) and value in WORDS_FOR_NONE:
            value = None
        if value is None and _optional(hint):
            kept[name] = None
        elif section is not None:
            if not isinstance(value, dict):
                raise InputError(f"{key}={_short(value)} {where}: expected {_expected(key)}")
            kept[name] = _walk(section, value, key + ".", where)
        else:
            kept[name] = _leaf(hint, value, key, where)
    return kept


def _nearest_setting(key: str, prefix: str, hints: dict) -> str:
    leaf = key.rpartition(".")[2]
    same = [entry.name for entry in field_help() if entry.name.rpartition(".")[2] == leaf]
    if same:
        return f"; did you mean {' or '.join(same)}?"
    return nearest(key, [prefix + name for name in hints]) or "; `rlhf-jax config --help` lists all"


def _leaf(hint: Any, value: Any, key: str, where: str) -> Any:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    shown = f"{key}={_short(value)} {where}"
    if isinstance(value, str) and ("${" in value or value == "???"):
        raise InputError(f"{shown}: interpolations (${{...}}) and ??? are refused; write the value itself")
    record = dataclasses.make_dataclass("Leaf", [("value", hint)])
    try:
        return OmegaConf.merge(OmegaConf.structured(record), {"value": value}).value
    except (OmegaConfBaseException, OverflowError):
        raise InputError(f"{shown}: expected {_expected(key)}") from None


def _overlay(under: dict, over: dict) -> None:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(under.get(name), dict):
            _overlay(under[name], value)
        else:
            under[name] = value


def _build(given: dict) -> Config:
    """Defaults under the given values, which `_settings_in` has checked."""
    from omegaconf import OmegaConf

    defaults = OmegaConf.structured(Config)
    OmegaConf.set_readonly(defaults, False)
    return typing.cast(Config, OmegaConf.to_object(OmegaConf.merge(defaults, given)))


def _short(value: Any) -> str:
    text = _one_line("none" if value is None else value)
    return text if len(text) <= 60 else text[:57] + "..."


def _one_line(value: Any) -> str:
    return " ".join(str(value).split())


if __name__ == "__main__":
    print(reference_page(), end="")
