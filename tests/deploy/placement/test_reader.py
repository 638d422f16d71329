"""The placement file: what is written comes back as it was, and each mistake is named by line, table and key."""

from __future__ import annotations

import json
import tomllib
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from deploy.placement.plan import KVCACHE, READS, ROUTER, flags_of
from deploy.placement.reader import CONFIG_OF, line_of, read_placement
from serving.messages import Role
from serving.options import ConfigError, build

# Settings of every type, and values that they may have.
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "max_model_len": st.integers(2, 1 << 20),
    "block_size": st.integers(1, 512) | st.sampled_from(["1KiB", "16"]),
    "deterministic": st.booleans(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "served_model_name": st.lists(st.from_regex(r"[a-z/.$ ]*[a-z]", fullmatch=True), min_size=1, max_size=3),
    "cpus": st.sampled_from(["0-3,8", "0"]),
    "kvcache_wait": st.floats(0.01, 100, allow_nan=False),
    "data_parallel_size_local": st.just(1),
    "data_parallel_address": st.sampled_from(["127.0.0.1", "10.0.0.1"]),
    "queue_patience": st.floats(0, 100) | st.integers(0, 9),
    "rate_limit_requests": st.integers(1, 99),
    "ram": st.sampled_from(["4GiB", 1 << 30]),
    "disk": st.sampled_from(["/var/kv", "kv"]),
    "log_level": st.sampled_from(["debug", "info"]),
    "heartbeat_interval": st.floats(0.1, 1),
    "speculative_config": st.just('{"method": "ngram"}'),
}
FEW = examples(max_examples=30)
GOOD = '[[workers]]\nrole = "mixed"\n'


def settings(*names: str) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional={name: VALUES[name] for name in VALUES if name in names})


def own(kind: str) -> st.SearchStrategy[dict[str, Any]]:
    return settings(*(READS[kind] - {"heartbeat_interval"}))


def toml(value: Any) -> str:
    return json.dumps(value) if not isinstance(value, float) else repr(value)


def written(table: dict[str, Any], dashes: bool) -> str:
    lines = (f"{key.replace('_', '-') if dashes else key} = {toml(value)}\n" for key, value in table.items())
    return "".join(lines)


@st.composite
def placements(draw: st.DrawFn) -> tuple[dict[str, Any], str]:
    """What a file says, and the file."""
    numbers = st.integers(1, 5)
    workers = [
        {"role": role, "name": f"{role}-{letter}", "count": draw(numbers), **draw(own(role))}
        for letter, role in enumerate(draw(st.lists(st.sampled_from([str(role) for role in Role]), max_size=3)))
    ]
    workers.append({"role": "mixed", **draw(own("mixed"))})
    data = {
        "model": draw(st.sampled_from(["/models/a", "owner/name"])),
        "common": draw(settings(*VALUES)),
        "router": draw(own(ROUTER)),
        "workers": workers,
        "kvcache": {"count": draw(numbers), **draw(own(KVCACHE))},
    }
    dashes = draw(st.booleans())
    text = written({"model": data["model"]}, dashes)
    for name in ("common", "router", "kvcache"):
        text += f"[{name}]\n{written(data[name], dashes)}"
    for worker in workers:
        text += f"[[workers]]\n{written(worker, dashes)}"
    return data, text


def joined(data: dict[str, Any], kind: str, table: dict[str, Any]) -> dict[str, Any]:
    both = {**data["common"], **table}
    return {name: value for name, value in both.items() if name in READS[kind]}


@FEW
@given(placements())
def test_what_is_written_comes_back(placed: tuple[dict[str, Any], str]) -> None:
    data, text = placed
    plan = read_placement(text)
    assert plan.model == data["model"]
    assert plan.router.settings == joined(data, ROUTER, data["router"])
    assert plan.nodes is not None
    assert (plan.nodes.count, plan.nodes.settings) == (
        data["kvcache"]["count"],
        joined(data, KVCACHE, data["kvcache"]),
    )
    assert [(group.kind, group.name, group.count, group.settings) for group in plan.workers] == [
        (one["role"], one.get("name", one["role"]), one.get("count", 1), joined(data, one["role"], one))
        for one in data["workers"]
    ]


@FEW
@given(placements())
def test_flags_mean_what_the_file_does(placed: tuple[dict[str, Any], str]) -> None:
    """As the parser of the command reads them (serving.options), in the file's words and in a flag's."""
    plan = read_placement(placed[1])
    for group in plan.groups:
        for name, value in group.settings.items():
            (flag,) = flags_of({name: value})
            word, equals, given_value = flag.partition("=")
            as_flag: Any = given_value if equals else not word.startswith("--no-")
            config = CONFIG_OF[name]
            assert word.removeprefix("--no-" if as_flag is False else "--").replace("-", "_") == name
            assert build(config, {}, {}, {name: as_flag}) == build(config, {name: value}, {}, {})


@given(st.text() | st.text(alphabet='[]{}="\n#a0.,'))
@example("a = " + "[" * 3000)
@example("a = " + "1" * 5000)
@example('[[workers]]\nrole = "mixed"\n[workers.role]')
def test_any_text_is_a_plan_or_an_error_in_one_line(text: str) -> None:
    try:
        read_placement(text)
    except ConfigError as error:
        assert error.message.startswith("placement.toml")


JSON = st.recursive(
    st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "count", "ram"]), inner),
    max_leaves=4,
)


@given(st.sampled_from(["model", "common", "router", "workers", "kvcache"]), JSON)
def test_any_value_in_place_of_a_table_is_an_error_or_a_plan(key: str, value: Any) -> None:
    text = f"{key} = {inline(value)}\n" + (GOOD if key != "workers" else "")
    try:
        tomllib.loads(text)
    except ValueError:
        return
    try:
        read_placement(text)
    except ConfigError as error:
        assert error.message.startswith("placement.toml")


def inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(inline, value)) + "]"
    return json.dumps(value)


MISTAKES = {
    "line 2, column": "model = 'a'\n= 3\n",
    ":1: unknown key 'modle' (did you mean 'model'?)": "modle = 'a'\n" + GOOD,
    ":1: model = 3 is not": "model = 3\n" + GOOD,
    "there are no workers": "model = 'a'\n",
    ":1: workers are tables of an array": "[workers]\nrole = 'mixed'\n",
    ":3: [[workers]] number 1: role is missing": "model = 'a'\n\n[[workers]]\ncount = 2\n",
    ":5: [[workers]] number 2: role = 'cook' is none of": GOOD + "\n[[workers]]\nrole = 'cook'\n",
    ":3: [[workers]] number 1: count = 0 is not a number from 1": GOOD + "count = 0\n",
    ":3: [[workers]] number 1: count = True is not a number": GOOD + "count = true\n",
    ":2: [[workers]] number 1: prefill workers need decode workers too": "[[workers]]\nrole = 'prefill'\n",
    ":4: [[workers]] number 2: there is a group 'mixed' already": GOOD + GOOD,
    ":3: [[workers]] number 1: name = 'Big One' is no name": GOOD + "name = 'Big One'\n",
    ":3: [[workers]] number 1: name = 'kvcache-0' is no name": GOOD + "name = 'kvcache-0'\n",
    ":4: [[workers]] number 1: block_size: 0 must be at least 1": GOOD + "\nblock_size = 0\n",
    ":3: [[workers]] number 1: unknown setting 'block_sise' (did you mean 'block_size'?)": GOOD + "block_sise = 1\n",
    ":3: [[workers]] number 1: port is no setting of a mixed worker, but of router": GOOD + "port = 80\n",
    ":3: [[workers]] number 1: grpc-port follows from the placement": GOOD + "grpc-port = 80\n",
    ":3: [[workers]] number 1: headless: hosts of a worker's ranks are no services": GOOD + "headless = true\n",
    ":3: [[workers]] number 1: data-parallel-start-rank: hosts of": GOOD + "data-parallel-start-rank = 2\n",
    ":4: [router]: data_parallel_address is no setting of the router": GOOD + "[router]\ndata_parallel_address = 'a'\n",
    ":3: [[workers]] number 1: heartbeat_interval is the same for all services": GOOD + "heartbeat_interval = 1\n",
    ":4: [router]: api_key: keys do not belong in a file: set MILLRACE_API_KEY": GOOD + "[router]\napi_key = 's'\n",
    ":4: [common]: cluster-key: keys do not belong in a file": GOOD + "[common]\ncluster-key = 's'\n",
    ":5: [kvcache]: disk_write: 'twice' is none of": GOOD + "[kvcache]\n\ndisk-write = 'twice'\n",
    ":5: [common]: block_size is given twice": GOOD + "[common]\nblock-size = 8\nblock_size = 8\n",
    ":6: [common]: served_model_name: 1 is not a text": GOOD + "[common]\nserved_model_name = [\n  1,\n]\n",
}  # fmt: skip


@pytest.mark.parametrize("told", MISTAKES)
def test_a_mistake_is_told_with_its_place(told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_placement(MISTAKES[told])
    message = caught.value.message
    assert told in message
    assert "'s'" not in message and "\n" not in message


@FEW
@given(placements(), st.data())
def test_a_wrong_value_is_told_by_its_own_line(placed: tuple[dict[str, Any], str], data: st.DataObject) -> None:
    lines = placed[1].split("\n")
    places = [number for number, line in enumerate(lines) if line.startswith("role = ")]
    number = data.draw(st.sampled_from(places))
    lines[number] = 'role = "cook"'
    with pytest.raises(ConfigError, match=rf"^placement.toml:{number + 1}: \[\[workers\]\] number"):
        read_placement("\n".join(lines))


def test_a_key_in_a_text_is_not_the_key() -> None:
    text = 'a = """\nb = 1\n"""\nb = 2\nlist = [\n  1,\n]\n'
    assert line_of(text, ("b",)) == 4
    assert line_of(text, ("list",)) == 7
    assert line_of(text, ("nothing",)) is None
