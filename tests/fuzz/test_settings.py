"""Configurations, of `key=value` and YAML files: each is one that prints and reads back, or a refusal."""

import pathlib
import tempfile

import yaml
from hypothesis import strategies as st

from rlhf_jax.config import check, flat, load_config, to_dict, to_yaml
from rlhf_jax.settings import Config
from tests.fuzz.inputs import JUNK, LEAVES, TEXTS, VALUES, changed, fuzz, mutated, outcome

KEYS = sorted(flat(Config()))
SECTIONS = ["ppo", "policy.shape", "placement", "placement.critic", "data", "run"]
TREE = {
    name: value
    for name, value in to_dict(Config()).items()
    if name in ("critic", "data", "lora", "placement")
}
YAML = yaml.safe_dump(TREE)
WORDS = r"""
null ~ NaN .nan .inf -.inf 1e999 0x10 0o7 1_000 1:30 010 yes off 2001-01-01 2001-99-99 2001-01-01T99:99:99Z
!!int_x !!float_x !!timestamp_x !!bool_x !!binary_aGk= !!set_{a} !!omap_[a] !!merge_x !!str ! !! !a_b =
!!python/object/apply:os.system_[ls] << <<:_3 {<<:_3} &a_[*a] &a_{b:_*a} *a ${oc.env:HOME} ${a ??? ' "
"\ud800" "\x00" %YAML_9.9 ?_a :_ a:_b {1:_2} {null:_2} {[1]:_2} {1.5:_2} {true:_2} {a:_1,_a:_2} | > # @ `
"""
SPECIAL = ["", "\t", "\ufeff1", "--- 1\n--- 2", "9" * 5000, "[" * 2000, "{a: " * 2000, "- " * 2000]
SPECIAL += [word.replace("_", " ") for word in WORDS.split()]
SETTINGS = st.one_of(st.sampled_from(SPECIAL), TEXTS, LEAVES.map(str), VALUES.map(repr), st.text(max_size=8))


def read(path, overrides, *places):
    def resolved():
        config = load_config(path, overrides)
        check(config)
        return config

    config = outcome(resolved, *places)
    if config is not None:
        with tempfile.TemporaryDirectory() as folder:
            again = pathlib.Path(folder) / "again.yaml"
            again.write_text(to_yaml(config), encoding="utf-8")
            assert load_config(str(again), []) == config
    return config


@fuzz(st.one_of(st.sampled_from(KEYS), st.sampled_from(SECTIONS)), SETTINGS)
def test_values_on_the_command_line(key, text):
    """A refusal names the key; ranges and sizes are checked across settings, and may name the sum."""
    read(None, [f"{key}={text}"], key, key.rpartition(".")[2])


@fuzz(
    st.lists(
        st.one_of(
            TEXTS,
            st.tuples(TEXTS, SETTINGS).map("=".join),
            st.tuples(st.sampled_from(KEYS), TEXTS).map(".x=".join),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_arguments_of_anything(overrides):
    read(None, overrides)


@st.composite
def yaml_files(draw):
    kind = draw(st.sampled_from(["mutated", "mutated", "changed", "special"]))
    if kind == "mutated":
        return draw(mutated(YAML.encode()))
    if kind == "changed":
        text = yaml.safe_dump(draw(changed(TREE)), allow_unicode=draw(st.booleans()))
        return text.encode("utf-8", "surrogatepass")
    value = draw(
        st.one_of(SETTINGS.map(lambda text: text.encode("utf-8", "surrogatepass")), st.sampled_from(JUNK))
    )
    *sections, leaf = draw(st.sampled_from(KEYS)).split(".")
    lines = [b"  " * depth + f"{name}:".encode() for depth, name in enumerate([*sections, leaf])]
    return b"\n".join(lines) + b" " + value + b"\n"


@fuzz(yaml_files(), share=0.3)
def test_files(data):
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "settings.yaml"
        path.write_bytes(data)
        read(str(path), [])
