"""How many inputs: a few hundred by default, more than ten thousand with --long."""

from tests.fuzz import inputs


def pytest_configure(config):
    if config.getoption("--long"):
        inputs.make_long()


def pytest_terminal_summary(terminalreporter):
    if inputs.ENDS:
        ends = ", ".join(f"{count} {end}" for end, count in sorted(inputs.ENDS.items()))
        terminalreporter.write_line(f"fuzzed inputs: {ends}")
