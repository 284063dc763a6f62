"""The order of the package: what may import what, who names mesh axes, and what is never imported."""

import ast
import pathlib
import subprocess
import sys

import pytest

import rlhf_jax

PACKAGE = pathlib.Path(rlhf_jax.__file__).parent
# A module may import from its own floor and from those below.
FLOORS = (
    (
        "errors",
        "cluster",
        "settings",
        "layouts",
        "checks",
        "config",
        "quiet",
        "records",
        "storage",
        "text_statistics",
        "versions",
    ),
    ("losses", "types"),
    ("models", "sharding", "data"),
    ("rollout", "checksums", "checkpoint", "metrics", "run_directory", "comparison"),
    ("trainers", "planning", "report", "plots"),
    ("cli", "__main__"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
MODULES = sorted(path for path in PACKAGE.rglob("*.py"))


def name_of(path):
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def type_checking_only(tree):
    """Nodes under `if TYPE_CHECKING`, which never run."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def imports_of(path, names):
    """Absolute names of the modules that a module imports, wherever in it."""
    tree = tree_of(path)
    aside = type_checking_only(tree)
    for node in ast.walk(tree):
        if node in aside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in names else node.module


NAMES = {name_of(path) for path in MODULES}
GRAPH = {name_of(path): set(imports_of(path, NAMES)) for path in MODULES}


def part_of(module):
    """`losses` of rlhf_jax.losses.ppo."""
    return module.split(".")[1] if "." in module else ""


def test_every_module_has_a_floor():
    assert {part_of(name) for name in NAMES} - {""} - set(FLOOR) == set()


@pytest.mark.parametrize("module", sorted(NAMES - {"rlhf_jax"}))
def test_no_module_imports_from_a_higher_floor(module):
    own = FLOOR[part_of(module)]
    higher = [m for m in GRAPH[module] if m.startswith("rlhf_jax.") and FLOOR[part_of(m)] > own]
    assert higher == []


def test_no_circle_of_imports():
    """Packages count as their modules: an __init__ that gathers names is no circle of its own."""
    done, path = set(), []

    def visit(module):
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module in done:
            return
        path.append(module)
        for imported in sorted(GRAPH[module] & NAMES - {"rlhf_jax"}):
            visit(imported)
        path.pop()
        done.add(module)

    for module in sorted(NAMES):
        visit(module)


LIGHT = (
    "errors",
    "settings",
    "checks",
    "config",
    "records",
    "metrics",
    "run_directory",
    "text_statistics",
    "cli",
)


def test_light_modules_load_no_jax():
    modules = ", ".join(f"rlhf_jax.{name}" for name in LIGHT)
    code = (
        f"import sys, {modules}; print(sorted({{'jax', 'flax', 'transformers', 'torch'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", ["errors", "settings"])
def test_errors_and_settings_import_the_standard_library_only(name):
    roots = {module.split(".")[0] for module in GRAPH[f"rlhf_jax.{name}"]}
    assert roots <= set(sys.stdlib_module_names)


def test_losses_import_jax_and_chex_only():
    imported = set().union(*(GRAPH[name] for name in NAMES if part_of(name) == "losses"))
    roots = {module.split(".")[0] for module in imported} - set(sys.stdlib_module_names)
    assert roots <= {"jax", "chex", "rlhf_jax"}
    own = {part_of(module) for module in imported if module.startswith("rlhf_jax.")}
    assert own <= {"losses", "types", "errors"}


OUTSIDE = [path for path in MODULES if path.relative_to(PACKAGE).parts[0] != "sharding"]
IDS = [name_of(path) for path in OUTSIDE]
COLLECTIVES = {
    "psum",
    "pmean",
    "pmax",
    "all_gather",
    "axis_index",
    "PartitionSpec",
    "P",
    "size",
    "Mesh",
    "make_mesh",
}


@pytest.mark.parametrize("path", OUTSIDE, ids=IDS)
def test_only_sharding_names_mesh_axes(path):
    tree = tree_of(path)
    strings = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    assert {"fsdp", "tensor"} & {string for string in strings if isinstance(string, str)} == set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            given = [a.value for a in node.args if isinstance(a, ast.Constant)]
            assert not (called in COLLECTIVES and "data" in given), f"line {node.lineno}"


@pytest.mark.parametrize("path", OUTSIDE, ids=IDS)
def test_only_sharding_makes_meshes_and_partition_specs(path):
    made = {"Mesh", "make_mesh", "PartitionSpec", "AbstractMesh"}
    names = {
        alias.name
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    attributes = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    assert made & (names | attributes) == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_pickle_and_no_nnx(path):
    imported = GRAPH[name_of(path)]
    assert not any(m.split(".")[0] in {"pickle", "cloudpickle", "dill", "joblib"} for m in imported)
    assert not any("nnx" in m.split(".") for m in imported)
    attributes = {node.attr for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
    assert "nnx" not in attributes
    keywords = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.keyword)]
    for keyword in keywords:
        allowed = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        assert keyword.arg not in {"trust_remote_code", "allow_pickle"} or allowed


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_have_one_idea(path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef):
            assert node.end_lineno - node.lineno + 1 <= 70, node.name


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_file_is_named_for_no_idea(path):
    assert path.stem not in {"utils", "common", "helpers", "base", "core"}
