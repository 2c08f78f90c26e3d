"""`gdnjax doctor`: what does not fit together, and a GPU that is not used."""

from __future__ import annotations

import json

import pytest

from gdnjax.cli import doctor, main
from gdnjax.cli.doctor import PLUGINS, find_devices, installed, platform_problems, plugin_problems

PAIR = {"jax-rocm7-plugin": "0.10.2", "jax-rocm7-pjrt": "0.10.2"}


def test_versions_that_fit() -> None:
    assert plugin_problems("0.10.2", "0.10.2", {}) == []
    assert plugin_problems("0.10.2", "0.10.2", PAIR) == []
    fixes = {"jax-rocm7-plugin": "0.10.2.post1", "jax-rocm7-pjrt": "0.10.2.post3"}
    assert plugin_problems("0.10.2", "0.10.2", fixes) == []


@pytest.mark.parametrize(
    ("jax", "jaxlib", "plugins", "problems"),
    [
        ("0.10.2", "0.10.1", {}, ["jaxlib 0.10.1 with jax 0.10.2: install jaxlib==0.10.2"]),
        ("0.10.2", "", {}, ["jaxlib  with jax 0.10.2: install jaxlib==0.10.2"]),
        (
            "0.10.2",
            "0.10.2",
            PAIR | {"jax-rocm7-plugin": "0.9.1"},
            ["jax-rocm7-plugin 0.9.1 with jax 0.10.2: install jax-rocm7-plugin==0.10.2"],
        ),
        (
            "0.10.2",
            "0.10.2",
            {"jax-rocm7-plugin": "0.10.20", "jax-rocm7-pjrt": "0.10.2"},
            ["jax-rocm7-plugin 0.10.20 with jax 0.10.2: install jax-rocm7-plugin==0.10.2"],
        ),
        (
            "0.10.2",
            "0.10.2",
            {"jax-cuda12-pjrt": "0.10.2"},
            ["jax-cuda12-pjrt is installed without jax-cuda12-plugin: install jax-cuda12-plugin==0.10.2"],
        ),
        (
            "0.10.2",
            "0.10.2",
            {"jax-cuda12-plugin": "0.10.2", "jax-cuda13-pjrt": "0.10.2"},
            [
                "jax-cuda12-plugin is installed without jax-cuda12-pjrt: install jax-cuda12-pjrt==0.10.2",
                "jax-cuda13-pjrt is installed without jax-cuda13-plugin: install jax-cuda13-plugin==0.10.2",
            ],
        ),
    ],
)
def test_versions_that_do_not(jax: str, jaxlib: str, plugins: dict[str, str], problems: list[str]) -> None:
    assert plugin_problems(jax, jaxlib, plugins) == problems


@pytest.mark.parametrize(
    ("wanted", "found", "plugins", "env", "problem"),
    [
        (None, "cpu", {}, "", None),
        (None, "cuda", {"jax-cuda12-plugin": "1"}, "", None),
        (None, "rocm", PAIR, "", None),
        ("rocm", "rocm", PAIR, "", None),
        ("cpu", "cpu", PAIR, "", None),
        (
            "rocm",
            "cpu",
            {},
            "",
            "rocm was asked for and JAX uses cpu: check the driver and install the extra gdnjax[rocm]",
        ),
        ("cuda", "rocm", {}, "", "cuda was asked for and JAX uses rocm"),
        ("cuda", None, {}, "", "cuda was asked for and JAX uses no device"),
        ("cpu", "cuda", {}, "", "cpu was asked for and JAX uses cuda: set JAX_PLATFORMS=cpu"),
        ("rocm", "cpu", PAIR, "cpu", "rocm was asked for and JAX uses cpu"),
        (None, "cpu", PAIR, "", "the rocm plugin is installed and JAX runs on the CPU"),
        (None, "cpu", {"jax-cuda12-pjrt": "1"}, "", "the cuda plugin is installed and JAX runs on the CPU"),
        (None, "cpu", PAIR, "rocm", "the rocm plugin is installed and JAX runs on the CPU"),
        # asked for by the environment
        (None, "cpu", PAIR, "cpu", None),
        (None, "cpu", PAIR, "rocm,cpu", None),
    ],
)
def test_platforms(
    wanted: str | None, found: str | None, plugins: dict[str, str], env: str, problem: str | None
) -> None:
    problems = platform_problems(wanted, found, plugins, env)
    if problem is None:
        assert problems == []
    else:
        assert len(problems) == 1 and problem in problems[0]


def test_plugins_come_in_pairs_of_known_names() -> None:
    assert {"jax-rocm7-plugin", "jax-rocm7-pjrt", "jax-cuda12-plugin", "jax-cuda12-pjrt"} <= set(PLUGINS)
    assert len(PLUGINS) == len(set(PLUGINS))


def test_installed() -> None:
    assert set(installed(("numpy", "no-such-package-here"))) == {"numpy"}


def test_devices_of_this_machine() -> None:
    problems: list[str] = []
    devices, platform = find_devices(problems)
    assert (platform, problems) == ("cpu", [])
    assert devices and devices[0].startswith("0: ")


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise RuntimeError("Unable to initialize backend 'rocm'")

    monkeypatch.setattr("jax.devices", missing)
    problems: list[str] = []
    assert find_devices(problems) == ([], None)
    assert problems == ["JAX finds no device: Unable to initialize backend 'rocm'"]


# The command


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed besides the real packages; empty to begin with."""
    found: dict[str, str] = {}
    monkeypatch.setattr(doctor, "installed", lambda names: dict(found) if names == PLUGINS else installed(names))
    return found


@pytest.mark.newest
def test_a_sound_machine(capsys: pytest.CaptureFixture[str], plugins: dict[str, str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "no problems found" in out and "jaxlib" in out and "platform             cpu" in out
    assert main(["doctor", "--platform", "cpu"]) == 0


def test_json(capsys: pytest.CaptureFixture[str], plugins: dict[str, str]) -> None:
    assert main(["doctor", "--json"]) == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    report = json.loads(out)
    assert report.keys() == {"versions", "devices", "platform", "problems"}
    assert {"python", "gdnjax", "jax", "jaxlib", "flax", "numpy"} <= report["versions"].keys()
    assert (report["platform"], report["problems"]) == ("cpu", [])


@pytest.mark.parametrize("platform", ["rocm", "cuda"])
def test_a_missing_gpu_is_a_failure(capsys: pytest.CaptureFixture[str], platform: str) -> None:
    assert main(["doctor", "--platform", platform]) == 1
    out = capsys.readouterr().out
    assert f"PROBLEM              {platform} was asked for and JAX uses cpu" in out
    assert "no problems found" not in out


def test_an_unused_plugin_is_a_failure(
    capsys: pytest.CaptureFixture[str], plugins: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import jax

    plugins.update(dict.fromkeys(PAIR, jax.__version__))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["jax-rocm7-plugin"] == jax.__version__
    assert len(report["problems"]) == 1 and "the rocm plugin is installed" in report["problems"][0]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert main(["doctor"]) == 0


def test_another_version_of_a_plugin_is_a_failure(capsys: pytest.CaptureFixture[str], plugins: dict[str, str]) -> None:
    plugins.update(PAIR | {"jax-rocm7-pjrt": "0.0.1"})
    assert main(["doctor"]) == 1
    assert "jax-rocm7-pjrt 0.0.1 with jax" in capsys.readouterr().out
