"""What holds the project together: scripts, README, links, configurations, licence."""

import ast
import itertools
import pathlib
import re
import shutil
import subprocess
import tomllib

import jax
import numpy as np
import pytest

import rlhf_jax
from rlhf_jax.checks import check
from rlhf_jax.config import load_config
from rlhf_jax.data.tokenizer import train_tokenizer
from rlhf_jax.models.configs import TransformerConfig
from rlhf_jax.models.export import export_model
from rlhf_jax.models.parameters import init_model

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = pathlib.Path(rlhf_jax.__file__).parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md")]
SCRIPTS = [*(ROOT / "scripts").glob("*.sh"), ROOT / ".ci" / "run"]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def ids(paths):
    return [path.relative_to(ROOT).as_posix() for path in paths]


def blocks(text, language):
    """Contents of the fenced code blocks in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.S | re.M)


@pytest.mark.parametrize("script", SCRIPTS, ids=ids(SCRIPTS))
def test_scripts_are_strict_bash(script):
    text = script.read_text()
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "set -euo pipefail" in text
    subprocess.run(["bash", "-n", script], check=True)
    for line in text.splitlines():  # a torch without a version may be a build of several gigabytes
        assert line.startswith("#") or "install" not in line or not re.search(r"\btorch\b(?!==)", line), line


@pytest.mark.parametrize("argument", ["--help", "ppo.iterations"])
def test_the_quickstart_refuses_what_is_no_setting(argument):
    done = subprocess.run(
        ["bash", ROOT / "scripts/quickstart.sh", argument], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        f"error: '{argument}' is not key=value; usage: bash scripts/quickstart.sh [key=value ...]"
    ]


def test_installing_without_a_python_says_what_to_do(tmp_path):
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/install.sh", tmp_path / "scripts")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    command = ["bash", str(tmp_path / "scripts/install.sh")]
    environment = {"PATH": "/usr/bin:/bin", "PYTHON": "python-that-is-missing"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "PYTHON=python-that-is-missing" in done.stderr
    assert not (tmp_path / ".venv").exists()


def test_the_commands_of_the_pages_exist():
    text = "\n".join(itertools.chain.from_iterable(blocks(p.read_text("utf-8"), "bash") for p in PAGES))
    scripts = re.findall(r"bash (\S+)", text)
    assert {"scripts/quickstart.sh", "scripts/test.sh", ".ci/run"} <= set(scripts)
    assert [script for script in scripts if not (ROOT / script).is_file()] == []
    configs = re.findall(r"configs/\S+\.yaml", text)
    assert configs
    assert [config for config in configs if not (ROOT / config).is_file()] == []


def anchors(page):
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_links_lead_somewhere(page):
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("page", PAGES, ids=ids(PAGES))
def test_files_that_a_page_names_exist(page):
    for name in re.findall(r"`((?:[\w.]+/)+[\w.]*)`", page.read_text(encoding="utf-8")):
        if name.endswith(".py") or name.startswith(("rlhf_jax/", "tests/", "docs/", "configs/", "scripts/")):
            assert any((root / name).exists() for root in (ROOT, PACKAGE)), name


def test_every_page_is_in_the_index():
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\S+\.md)\)", index)) == pages


def test_the_iteration_table_names_functions_that_are_there():
    rows = re.findall(r"^\| \d+ \| (.*?) \| (.*?) \|", (ROOT / "docs/concepts.md").read_text("utf-8"), re.M)
    assert len(rows) == 10
    for functions, files in rows:
        source = "\n".join((PACKAGE / file).read_text() for file in re.findall(r"`([^`]+)`", files))
        for name in re.findall(r"`([^`]+)`", functions):
            assert re.search(rf"^(def|class) {name}\b", source, re.M), name


@pytest.mark.parametrize("path", CONFIGS, ids=ids(CONFIGS))
def test_configurations_are_valid_short_and_begin_with_their_command(path):
    lines = path.read_text().splitlines()
    assert re.match(rf"# rlhf-jax (run|plan) configs/{path.name}\b", lines[0])
    assert len(lines) <= 45
    check(load_config(str(path), []))


@pytest.fixture
def quickstart_policy(tmp_path):
    """A folder in which a tiny model lies where the quickstart leaves its policy."""
    tokenizer = train_tokenizer(["a tiny text"], vocab_size=260)
    config = TransformerConfig(
        vocab_size=len(tokenizer), layers=1, embed=8, heads=2, kv_heads=1, head_dim=4, mlp=8, max_positions=16
    )
    model, variables = init_model(config, head="lm", dtype="float32", seed=0)
    directory = tmp_path / "runs" / "quickstart" / "best_policy"
    directory.parent.mkdir(parents=True)
    export_model(directory, model, variables, tokenizer=tokenizer)
    return tmp_path


def test_the_python_example_of_the_readme_runs(quickstart_policy, monkeypatch):
    monkeypatch.chdir(quickstart_policy)
    (example,) = blocks(README, "python")
    names = {}
    exec(compile(example, "README.md", "exec"), names)
    assert np.isfinite(names["value"])
    assert float(names["metrics"]["ppo_kl"]) == 0.0
    assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(names["gradient"]))


def test_licence_and_types_are_shipped():
    licence = (ROOT / "LICENSE").read_text()
    assert "Apache License" in licence
    assert "Version 2.0, January 2004" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
    assert PYPROJECT["project"]["license"] == "Apache-2.0"
    assert (PACKAGE / "py.typed").is_file()
    shipped = PYPROJECT["tool"]["setuptools"]["package-data"]["rlhf_jax"]
    data = [path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in {".py", ".pyc"}]
    assert [path.name for path in data if not any(path.match(pattern) for pattern in shipped)] == []


def test_the_package_never_imports_torch():
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.split(".")[0] in {"torch", "tensorflow"} for name in names), path


def test_nothing_depends_on_torch_outside_its_extra():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert {"cuda", "tpu", "test", "torch", "tensorboard"} <= set(extras)
    others = [
        *PYPROJECT["project"]["dependencies"],
        *(r for name in extras if name != "torch" for r in extras[name]),
    ]
    assert [requirement for requirement in others if requirement.startswith("torch")] == []


def test_only_the_extras_for_tpus_ask_for_libtpu():
    """Its terms are not this project's."""
    extras = PYPROJECT["project"]["optional-dependencies"]
    asking = {name for name in extras if any("tpu" in requirement for requirement in extras[name])}
    assert asking == {"tpu", "tpu-aot"}
    assert not any("tpu" in requirement for requirement in PYPROJECT["project"]["dependencies"])


def test_pre_commit_has_local_hooks_only():
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (\S+)", text) == ["local"]
    assert {"ruff-check", "ruff-format", "pyright"} <= set(re.findall(r"id: (\S+)", text))


# Paths of one machine, and marks of unfinished work.
ELSEWHERE = re.compile(r"(?<!\w)/(root|home)/|\bfile:///|\b(TODO|FIXME|XXX)\b")


def test_files_speak_of_the_project_only():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    found = []
    for name in listed.stdout.splitlines():
        path = ROOT / name
        if path == pathlib.Path(__file__) or path.suffix in {".png", ".gz"} or not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if ELSEWHERE.search(line):
                found.append(f"{name}:{number}: {line.strip()[:80]}")
    assert found == []
