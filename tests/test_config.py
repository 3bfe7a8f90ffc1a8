"""The configuration: what is accepted, what is refused, and who wins where sources disagree."""

from __future__ import annotations

import functools
import inspect
import types
import typing
from pathlib import Path
from typing import Any, get_args, get_origin

import annotated_types
import numpy as np
import pytest
import yaml
from conftest import flags, leaves, tiny
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from pydantic import AfterValidator
from pydantic.fields import FieldInfo

import runner
from sansac import config as module
from sansac.checkpoint import read_config, write_config
from sansac.config import (
    CONFIGS,
    Actor,
    Config,
    ConfigError,
    Learning,
    Section,
    load_space,
    load_yaml,
    merge,
    partial,
    preset_for,
    resolve,
    slug,
)
from sansac.schedules import Schedule
from sansac.spiking import FUSED, load_popsan

STACKS = ("popsan", "mdc_san", "ilc_san", "care_bn", "plain_lif")


def is_task(path: Path) -> bool:
    algorithms = {name.replace("-", "_") for name in module.ALGORITHM_NAMES}
    return path.stem not in {*STACKS, *algorithms} and not path.stem.startswith(
        ("tune_", "sparse_")
    )


# -- drawing any valid configuration ---------------------------------------------------------------

WORD = st.from_regex(r"[A-Za-z][A-Za-z0-9_.-]{0,11}", fullmatch=True)


def values_of(annotation: Any, metadata: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Any value of a field's type within its bounds; new fields need nothing here."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is typing.Annotated:
        inner, *more = arguments
        return values_of(inner, (*metadata, *more))
    ends = [item for item in metadata if isinstance(item, AfterValidator)]
    if ends and isinstance(ends[0].func, functools.partial):
        return settings_within(**ends[0].func.keywords)
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([values_of(option) for option in arguments])
    if origin is tuple and Ellipsis not in arguments:
        return st.tuples(*map(values_of, arguments))
    if origin is tuple:
        return st.lists(values_of(arguments[0]), min_size=1, max_size=3)
    if origin is dict:
        scalars = st.booleans() | st.integers(-99, 99) | st.floats(-9, 9) | WORD
        return st.dictionaries(WORD, scalars, max_size=3)
    if annotation is type(None):
        return st.none()
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return sections(annotation)
    if AfterValidator(module._known_neuron) in metadata:
        return st.sampled_from(module.NEURON_NAMES)
    if AfterValidator(module._known_algorithm) in metadata:
        return st.sampled_from(module.ALGORITHM_NAMES)
    low, high = bounds(metadata)
    if annotation is bool:
        return st.booleans()
    if annotation is int:
        return st.integers(int(low), int(min(high, 10_000)))
    if annotation is float:
        inside = st.floats(low, high, allow_nan=False, allow_infinity=False)
        return inside.filter(lambda value: low < value < high)
    return WORD.map(annotation)  # str and Path


def settings_within(above: float, least: float, most: float) -> st.SearchStrategy[Any]:
    """Numbers and schedules between them."""
    low, high = max(above, least, 0.0), min(most, 1e9)
    number = st.floats(low, high).filter(lambda value: value > above)
    kinds = st.sampled_from(["linear", "exponential", "cosine"])
    shares = st.sampled_from([(0.0, 1.0), (0.25, 0.5), (0.6, 1.0)])
    schedule = st.builds(
        lambda kind, start, end, over: str(Schedule(kind, start, end, *over)),
        kinds, number.filter(bool), number.filter(bool), shares,
    )  # fmt: skip
    return number | schedule


def bounds(metadata: tuple[Any, ...]) -> tuple[float, float]:
    low, high = -1e9, 1e9
    for item in metadata:
        for bound in item.metadata if isinstance(item, FieldInfo) else [item]:
            match bound:
                case annotated_types.Ge(ge=value) | annotated_types.Gt(gt=value):
                    low = max(low, value)
                case annotated_types.Le(le=value) | annotated_types.Lt(lt=value):
                    high = min(high, value)
    return low, high


def sections(section: type[Section]) -> st.SearchStrategy[dict[str, Any]]:
    hints = typing.get_type_hints(section, include_extras=True)
    return st.fixed_dictionaries({name: values_of(hints[name]) for name in section.model_fields})


@st.composite
def configs(draw: st.DrawFn) -> Config:
    """Any configuration that does not contradict itself."""
    drawn = draw(sections(Config))
    learning, replay = drawn["learning"], drawn["replay"]
    windows = learning["n_step"] * drawn["num_envs"]
    replay["capacity"] = max(replay["capacity"], learning["batch_size"], windows)
    learning["learning_starts"] += learning["batch_size"] + windows
    drawn["actor"]["layer_norm"] &= not drawn["actor"]["batch_norm"]
    spiking = drawn["spiking"]
    spiking["output_connections"] &= spiking["decoder"] == "population"
    if spiking["neuron"] not in FUSED:
        spiking["backend"] = "auto"
    if isinstance(spiking["surrogate_width"], str):  # a schedule
        learning["cuda_graph"] &= not drawn["san"]
    critic = drawn["critic"]
    kind = draw(st.sampled_from(["twin", "quantiles", "subset", "dropout", "batch_norm"]))
    plain = {"quantiles": 1, "subset": 0, "dropout": 0.0, "batch_norm": False}
    critic.update({option: off for option, off in plain.items() if option != kind})
    papers = {"quantiles": "tqc", "subset": "redq", "dropout": "droq", "batch_norm": "crossq"}
    drawn["algorithm"] = papers.get(kind, drawn["algorithm"])
    if drawn["algorithm"] in papers.values():
        forms = {
            "tqc": {"quantiles": 5},
            "redq": {"subset": 2, "copies": 4},
            "droq": {"dropout": 0.1},
            "crossq": {"batch_norm": True, "layer_norm": False},
        }
        critic.update(plain | forms[drawn["algorithm"]])
    if drawn["algorithm"] == "ddpg":
        critic["copies"] = 1
    critic["drop"] %= critic["copies"] * critic["quantiles"]
    levels = drawn["actor"]["levels"]
    drawn["actor"]["levels"] = 0 if drawn["san"] or levels == 1 else levels
    critic["subset"] = min(critic["subset"], critic["copies"])
    replay.update(sampler="uniform", ratio=0.0, retention="fifo", hindsight="none")
    drawn["adaptive"]["moves"], drawn["exploration"]["gsde"] = "nothing", False
    assume(drawn["name"] is None or slug(drawn["name"]))
    return Config(**drawn)


thorough = settings(max_examples=40, suppress_health_check=list(HealthCheck))
brief = settings(max_examples=8, suppress_health_check=list(HealthCheck))


# -- round trips -----------------------------------------------------------------------------------


@thorough
@given(config=configs())
def test_any_configuration_survives_its_yaml(
    config: Config, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A run is rebuilt from its config.yaml alone."""
    directory = tmp_path_factory.getbasetemp()
    write_config(config, directory)
    assert read_config(directory) == config


@brief
@given(config=configs())
def test_every_field_is_an_option(config: Config) -> None:
    """All fields are given as options at once: one that is missing, or is read as something else,
    fails here."""
    assert set(leaves(config.dump())) == set(module.fields())
    asked = runner.parse(runner.Train, "train", flags(config))
    assert asked.options == config


def test_fields_lists_every_field_of_the_model() -> None:
    """`fields` feeds the hints at misspelt options and the refusals of a resume."""

    def walk(section: type[Section], prefix: str = "") -> list[str]:
        names = []
        for name, kind in typing.get_type_hints(section).items():
            if name == "model_config":
                continue
            nested = inspect.isclass(kind) and issubclass(kind, Section)
            names += walk(kind, f"{prefix}{name}.") if nested else [prefix + name]
        return names

    assert list(module.fields()) == walk(Config)


def test_every_field_is_documented() -> None:
    for name, section in module.fields().items():
        assert section.model_fields[name.rpartition(".")[2]].description, name


# -- what is refused -------------------------------------------------------------------------------


def refused(*layers: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(*layers)
    return str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"learning": {"gama": 0.9}}, "learning.gamma"),
        ({"batch_size": 64}, "learning.batch_size"),
        ({"total_step": 10}, "total_steps"),
        ({"spikng": {}}, "spiking"),
        ({"sac": {"learning_rte": 1.0}}, "sac.learning_rate"),
        ({"actor": {"gamma": 0.9}}, "learning.gamma"),
    ],
)
def test_an_unknown_key_names_the_nearest_right_one(wrong: dict[str, Any], right: str) -> None:
    message = refused(wrong)
    assert "unknown option" in message
    assert right in message.partition("did you mean")[2]


def test_an_unknown_key_like_no_other_gets_no_hint() -> None:
    assert refused({"zzzzzzzz": 1}) == "unknown option `zzzzzzzz`"


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ({"learning": {"gamma": 1.01}}, "learning.gamma"),
        ({"learning": {"gamma": float("nan")}}, "learning.gamma"),
        ({"learning": {"tau": -0.1}}, "learning.tau"),
        ({"learning": {"batch_size": 0}}, "learning.batch_size"),
        ({"learning": {"update_to_data": 0}}, "learning.update_to_data"),
        ({"learning": {"n_step": 0}}, "learning.n_step"),
        ({"sac": {"temperature": -1}}, "sac.temperature"),
        ({"sac": {"temperature": "off"}}, "sac.temperature"),
        ({"sac": {"learning_rate": float("inf")}}, "sac.learning_rate"),
        ({"actor": {"hidden": []}}, "actor.hidden"),
        ({"actor": {"hidden": [64, 0]}}, "actor.hidden"),
        ({"spiking": {"time_steps": 0}}, "spiking.time_steps"),
        ({"spiking": {"encoder": "poison"}}, "spiking.encoder"),
        ({"spiking": {"neuron": "lief"}}, "spiking.neuron"),
        ({"spiking": {"tau": 1.0}}, "spiking.tau"),
        ({"num_envs": 2.0}, "num_envs"),
        ({"num_envs": True}, "num_envs"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31}, "seed"),
        ({"total_steps": "many"}, "total_steps"),
        ({"threads": 0}, "threads"),
        ({"stop_at_return": float("inf")}, "stop_at_return"),
        ({"env": ""}, "env"),
        ({"env": None}, "env"),
        ({"learning": None}, "learning"),
        ({"learning": 3}, "learning"),
        ({"env_kwargs": [1]}, "env_kwargs"),
        ({"san": "perhaps"}, "san"),
    ],
)
def test_a_value_out_of_range_is_named_with_what_was_found(
    layer: dict[str, Any], name: str
) -> None:
    message = refused(layer)
    assert message.startswith(f"{name}: ")
    value = next(iter(leaves(layer).values()))
    assert message.endswith(f"found {0 if value == [64, 0] else value!r}")


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        ({"replay": {"capacity": 255}}, ("learning.batch_size (256)", "replay.capacity (255)")),
        ({"actor": {"levels": 1}}, ("actor.levels (1)", "2 or more")),
        ({"san": True, "actor": {"levels": 3}}, ("actor.levels (3)", "spiking.time_steps")),
        (
            {"learning": {"learning_starts": 100}},
            ("learning.learning_starts (100)", "learning.batch_size (256)"),
        ),
        (
            {"learning": {"n_step": 100, "batch_size": 16}, "replay": {"capacity": 300}},
            ("replay.capacity (300)", "learning.n_step", "num_envs"),
        ),
        ({"actor": {"layer_norm": True, "batch_norm": True}}, ("layer_norm", "batch_norm")),
        ({"critic": {"quantiles": 2, "drop": 4}}, ("critic.drop (4)", "quantiles")),
        ({"algorithm": "sac-v", "critic": {"quantiles": 5}}, ("critic.quantiles (5)", "sac-v")),
        ({"name": "../.."}, ("name", "'../..'")),
        ({"spiking": {"output_connections": True}}, ("output_connections", "'rate'")),
        ({"spiking": {"neuron": "clif", "backend": "native"}}, ("'clif'", "'native'")),
        ({"spiking": {"surrogate_width": "return:3:1:5..5"}}, ("surrogate_width", "5.0")),
    ],
)
def test_contradictions_name_both_sides(layer: dict[str, Any], names: tuple[str, ...]) -> None:
    message = refused(layer)
    assert all(name in message for name in names), message


@pytest.mark.parametrize(("num_envs", "n_step"), [(1, 1), (1, 5), (8, 3), (3, 100)])
def test_the_first_update_finds_a_batch_of_transitions(num_envs: int, n_step: int) -> None:
    """case 35: an n-step window closes n - 1 steps late, so learning must start that much later."""
    least = 16 + (n_step - 1) * num_envs
    layer: dict[str, Any] = {"num_envs": num_envs, "replay": {"capacity": 500}}
    learning = {"batch_size": 16, "n_step": n_step}
    resolve(layer, {"learning": learning | {"learning_starts": least}})
    message = refused(layer, {"learning": learning | {"learning_starts": least - 1}})
    assert f"learning.learning_starts ({least - 1})" in message and str(least) in message


def test_contradictions_may_be_mended_by_later_layers() -> None:
    """A preset alone may contradict the defaults; what counts is the whole."""
    layer = {"learning": {"batch_size": 6000}}
    assert partial(layer).learning.batch_size == 6000
    assert resolve(layer, {"learning": {"learning_starts": 6000}}).learning.batch_size == 6000
    with pytest.raises(ConfigError, match="batch_size"):
        resolve(partial(layer).dump())


def test_all_findings_are_reported_at_once() -> None:
    message = refused({"num_envs": 0, "seed": -1, "san": "perhaps"})
    assert [line.partition(":")[0] for line in message.splitlines()] == ["san", "seed", "num_envs"]


def test_a_section_built_by_hand_names_its_fields_in_full() -> None:
    with pytest.raises(ConfigError, match=r"^learning\.gamma: .*found 2"):
        Learning(gamma=2)
    with pytest.raises(ConfigError, match=r"`actor\.hiden`; did you mean `actor\.hidden`"):
        Actor(hiden=(1,))  # type: ignore[call-arg]


def test_a_configuration_cannot_change_under_a_run() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().seed = 3  # type: ignore[misc]


# -- files -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"- a\n- b\n", "key: value"),
        (b"just words", "key: value"),
        (b"1: 2\n", "key: value"),
        (b"a: [1,\n", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"seed: !!python/object/apply:os.getpid []\n", "not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_named(
    content: bytes, reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "odd.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=reason) as caught:
        load_yaml(path)
    assert str(path) in str(caught.value)


def test_python_tags_in_yaml_are_not_executed(tmp_path: Path) -> None:
    """case 30: a configuration is data, in a run directory as in a preset."""
    canary = tmp_path / "executed"
    text = f"seed: !!python/object/apply:os.mkdir ['{canary}']\n"
    (tmp_path / "config.yaml").write_text(text)
    for read in (lambda: load_yaml(tmp_path / "config.yaml"), lambda: read_config(tmp_path)):
        with pytest.raises(ConfigError):
            read()
    assert not canary.exists()


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_yaml(tmp_path / "empty.yaml") == {}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_preset_is_valid_and_says_what_it_is(path: Path) -> None:
    assert resolve(load_yaml(path)) != Config() or load_space(path)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize("task", [p.stem for p in sorted(CONFIGS.glob("*.yaml")) if is_task(p)])
@pytest.mark.parametrize("stack", STACKS)
def test_a_published_stack_is_whole_on_any_task(stack: str, task: str) -> None:
    """Whatever the task's preset chooses, the actor is the published one."""
    over = resolve(load_yaml(CONFIGS / f"{task}.yaml"), load_yaml(CONFIGS / f"{stack}.yaml"))
    alone = resolve(load_yaml(CONFIGS / f"{stack}.yaml"))
    assert over.spiking == alone.spiking and over.san
    for field in ("layer_norm", "batch_norm", "batch_norm_momentum", "reestimate_every"):
        assert getattr(over.actor, field) == getattr(alone.actor, field)
    assert over.learning == resolve(load_yaml(CONFIGS / f"{task}.yaml")).learning


def test_the_popsan_preset_is_the_actor_of_the_published_parameters() -> None:
    with np.load(Path(__file__).parent / "golden" / "popsan_bipedal.npz") as file:
        given = {k.removeprefix("param."): file[k] for k in file.files if k.startswith("param.")}
    config = resolve(load_yaml(CONFIGS / "popsan.yaml"))
    assert load_popsan(given).config == config.spiking


# -- precedence ------------------------------------------------------------------------------------


def test_presets_are_found_by_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONFIGS", tmp_path)
    (tmp_path / "task.yaml").write_text("seed: 7\n")
    assert all(preset_for(env) == {"seed": 7} for env in ("Task-v3", "space/Task-v12", "task"))
    assert not any(preset_for(env) for env in ("TaskHard-v3", "..", "../task.yaml"))
    assert Config.for_env("Task-v0").seed == 7
    assert Config.for_env("Task-v0", seed=8).seed == 8


def test_overrides_of_for_env_are_fields_or_sections() -> None:
    """A mapping changes the fields it names, a section object those that were set on it."""
    preset = Config.for_env("BipedalWalker-v3")
    config = Config.for_env("BipedalWalker-v3", san=True, learning={"gamma": 0.5})
    learning = preset.learning.model_copy(update={"gamma": 0.5})
    assert config == preset.model_copy(update={"san": True, "learning": learning})
    assert preset.learning.tau != Learning(gamma=0.5).tau
    section = Config.for_env("BipedalWalker-v3", san=True, learning=Learning(gamma=0.5))
    assert section == config


def test_layers_merge_section_by_section() -> None:
    merged = merge(
        {"seed": 1, "learning": {"gamma": 0.1, "tau": 0.2}, "env_kwargs": {"a": 1}},
        {"learning": {"tau": 0.3}, "env_kwargs": {"b": 2}},
    )
    learning = {"gamma": 0.1, "tau": 0.3}
    assert merged == {"seed": 1, "learning": learning, "env_kwargs": {"b": 2}}


def test_flags_win_over_files_over_the_preset_over_defaults(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four settings, each last set at another level; later files win over earlier ones."""
    monkeypatch.setattr(module, "CONFIGS", tmp_path)
    names = ("log_every", "eval_every", "checkpoint_every", "eval_episodes", "final_episodes")
    default, preset, first, second, given = names
    (tmp_path / "pendulum.yaml").write_text("".join(f"{k}: 101\n" for k in names[1:]))
    one, two = tmp_path / "one.yaml", tmp_path / "two.yaml"
    one.write_text("".join(f"{k}: 102\n" for k in (first, second, given)) + "env: Pendulum-v1\n")
    two.write_text("".join(f"{k}: 103\n" for k in (second, given)))
    expected = {default: Config().log_every, preset: 101, first: 102, second: 103, given: 104}
    for words in (
        ["--config", str(one), str(two), "--final-episodes", "104"],
        ["--final-episodes", "104", "--config", str(one), "--config", str(two)],
        [f"--config={one}", "--config", str(two), "--final-episodes=104"],
    ):
        config = trained_by(words, monkeypatch)
        assert config.env == "Pendulum-v1"
        assert {name: getattr(config, name) for name in names} == expected


def test_env_in_a_file_brings_its_preset_unless_a_flag_names_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONFIGS", tmp_path)
    (tmp_path / "pendulum.yaml").write_text("seed: 11\n")
    (tmp_path / "acrobot.yaml").write_text("seed: 12\n")
    file = tmp_path / "mine.yaml"
    file.write_text("env: Pendulum-v1\n")
    assert trained_by(["--config", str(file)], monkeypatch).seed == 11
    other = trained_by(["--config", str(file), "--env", "Acrobot-v1"], monkeypatch)
    assert (other.env, other.seed) == ("Acrobot-v1", 12)


def test_env_kwargs_are_key_value_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--env-kwargs", "continuous=True", "gravity=-9.5", "name=a=b", "sizes=[1, 2]"]
    config = trained_by(words, monkeypatch)
    expected = {"continuous": True, "gravity": -9.5, "name": "a=b", "sizes": [1, 2]}
    assert config.env_kwargs == expected


def trained_by(words: list[str], monkeypatch: pytest.MonkeyPatch) -> Config:
    """The configuration that `train` with these words hands to the manager."""
    import sansac.manager

    class Caught(Exception):
        pass

    def catch(config: Config) -> None:
        raise Caught(config)

    monkeypatch.setattr(sansac.manager, "Manager", catch)
    with pytest.raises(Caught) as caught:
        runner.main(words)
    return caught.value.args[0]


# -- names -----------------------------------------------------------------------------------------


@given(text=st.text(max_size=30))
def test_a_slug_is_one_safe_directory_name(text: str) -> None:
    name = slug(text)
    assert "/" not in name and "\0" not in name and not name.startswith(("-", "."))
    assert slug(name) == name


def test_the_tiny_configuration_dumps_plain_values() -> None:
    dumped = tiny(Path("somewhere")).dump()
    assert yaml.safe_load(yaml.safe_dump(dumped)) == dumped
    assert dumped["runs_dir"] == "somewhere" and dumped["actor"]["hidden"] == [16, 16]
