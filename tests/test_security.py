"""What SECURITY.md promises, read off the source and tried out."""

import ast
import pathlib
import re

import pytest

import rlhf_jax
from rlhf_jax import report
from rlhf_jax.config import from_dict, to_yaml
from rlhf_jax.metrics import MetricsLog, SamplesLog

PACKAGE = pathlib.Path(rlhf_jax.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
IDS = [path.relative_to(PACKAGE).as_posix() for path in MODULES]
EACH_MODULE = pytest.mark.parametrize("path", MODULES, ids=IDS)
PICKLES = {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal", "torch"}
LOADERS = {"from_pretrained", "from_config", "pipeline"}


def calls(path):
    """(dotted name, call) of every call in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keyword(call, name):
    return next((word.value for word in call.keywords if word.arg == name), None)


def is_false(value):
    return isinstance(value, ast.Constant) and value.value is False


@EACH_MODULE
def test_nothing_that_unpickles_is_imported(path):
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] in PICKLES for name in names), ast.unparse(node)


@EACH_MODULE
def test_nothing_is_loaded_that_could_run_code(path):
    for name, call in calls(path):
        last = name.rpartition(".")[2]
        if name in ("np.load", "numpy.load", "jnp.load"):
            assert is_false(keyword(call, "allow_pickle")), name
        if last in LOADERS:
            assert is_false(keyword(call, "trust_remote_code")), f"{path.name}: {name}"
        assert name not in ("yaml.load", "yaml.unsafe_load", "yaml.full_load"), path.name
        assert name not in ("eval", "exec", "compile", "os.system", "os.popen", "__import__"), path.name
        shell = keyword(call, "shell")
        assert shell is None or is_false(shell), f"{path.name}: {name}"


@EACH_MODULE
def test_templates_are_escaped_or_in_the_sandbox(path):
    for name, call in calls(path):
        if name.rpartition(".")[2] in ("Environment", "Template"):
            autoescape = keyword(call, "autoescape")
            assert isinstance(autoescape, ast.Constant)
            assert autoescape.value is True


def test_one_setting_names_code():
    """`reward.function`; every other import by name is of a module that the source spells out."""
    importing = {
        path.relative_to(PACKAGE).as_posix()
        for path in MODULES
        for name, call in calls(path)
        if name.rpartition(".")[2] == "import_module" and not isinstance(call.args[0], ast.Constant)
    }
    assert importing == {"rollout/reward_function.py"}


def test_data_sets_with_code_of_their_own_are_not_of_this_world():
    """Since version 4 `datasets` runs no script of a data set, whatever it is asked."""
    requirements = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'"datasets>=([4-9]|\d\d)', requirements)


EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)>\"'>{{ 7 * 7 }}</pre></style>"


@pytest.fixture
def page(tmp_path):
    """report.html of a run in which every text is hostile."""
    config = from_dict({"run": {"dir": str(tmp_path)}, "policy": {"model": EVIL}, "data": {"train": EVIL}})
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    with MetricsLog(tmp_path, tensorboard=False) as metrics:
        for step in (1, 2):
            metrics.write("ppo", step, {"score": 1.0, EVIL: 2.0})
    sample = {"phase": "eval", "sample": 0, "score": 1.0, "length": 3, "kl": 0.1, "truncated": False}
    with SamplesLog(tmp_path) as samples:
        for when, step in (("before", 0), ("after", 2)):
            for prompt in range(3):
                samples.write(
                    [
                        sample
                        | {"step": step, "when": when, "prompt_id": prompt, "response": f"{when} {EVIL}"}
                        | {"prompt": [{"role": EVIL, "content": EVIL}]}
                    ]
                )
    report.write_report(tmp_path)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def test_what_a_model_or_a_person_wrote_is_text_in_the_report(page):
    for tag in ("script", "img src=x", "/style></"):
        assert f"<{tag}" not in page
    assert "onerror=alert(1)&gt;" in page
    assert (
        page.count("&lt;script&gt;") >= 10
    )  # prompts, roles, responses, the model's name, the configuration
    assert "{{ 7 * 7 }}" in page


def test_the_report_runs_no_script_and_asks_no_other_place(page):
    assert not re.search(r"<(script|iframe|object|embed|link|form)\b", page)
    assert not re.search(r"\b(src|href|srcset)=\"(?!data:image/png;base64,)", page)


def test_the_page_of_promises_is_linked_and_says_what_is_code():
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert "SECURITY.md" in (ROOT / "README.md").read_text(encoding="utf-8")
    for word in ("reward.function", "safetensors", "pickle", "sandbox", "trust_remote_code"):
        assert word in text
