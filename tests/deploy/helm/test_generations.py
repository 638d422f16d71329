"""A roll to another generation, by the steps of docs/deploy-kubernetes.md: none touches the pods of the other one."""

from __future__ import annotations

import jsonschema

from scripts import chart_schema
from tests.deploy.helm import chart
from tests.deploy.helm.chart import Manifest, render
from tests.deploy.helm.manifests import RENDERS, of_kind

pytestmark = RENDERS

NEXT = {"image": {"tag": "next"}, "model": {"name": "/models/two"}}
OLD_PODS = {"millrace-prefill", "millrace-decode"}
NEW_PODS = {"millrace-prefill-b", "millrace-decode-b"}


def deployments(given: Manifest) -> dict[str, Manifest]:
    """Of workers, by name; the schema takes the values."""
    jsonschema.validate(chart.values(given), chart_schema.schema())
    found = {one["metadata"]["name"]: one["spec"] for one in of_kind(render(given)[0], "Deployment")}
    return {name: spec for name, spec in found.items() if name != "millrace-router"}


def test_generations_stand_side_by_side_and_leave_each_other_alone() -> None:
    before = deployments({})
    both = deployments({"generations": {"b": NEXT}})
    after = deployments({"generations": {"b": NEXT, "base": {"enabled": False}}})
    assert (set(before), set(both), set(after)) == (OLD_PODS, OLD_PODS | NEW_PODS, NEW_PODS)
    assert {name: both[name] for name in OLD_PODS} == before, "the old pods go on as they were"
    assert {name: both[name] for name in NEW_PODS} == after
    assert deployments({"generations": {"b": {**NEXT, "enabled": False}}}) == before, "and the way back is the same"


def test_routers_of_another_image_leave_a_generation_that_names_its_own_alone() -> None:
    pinned = {"image": {"tag": "next"}, "generations": {"base": {"image": {"tag": "cpu"}}, "b": NEXT}}
    assert {name: spec for name, spec in deployments(pinned).items() if name in OLD_PODS} == deployments({})


def test_a_generation_changes_what_it_names_and_nothing_else() -> None:
    given = {"generations": {"b": {**NEXT, "settings": {"max_num_seqs": 3}, "workers": {"decode": {"replicas": 5}}}}}
    both = deployments(given)
    for role, replicas in (("prefill", 1), ("decode", 5)):
        old, new = both[f"millrace-{role}"], both[f"millrace-{role}-b"]
        assert (old["replicas"], new["replicas"]) == (1, replicas)
        (was,), (now,) = (each["template"]["spec"]["containers"] for each in (old, new))
        assert (was["image"], now["image"]) == ("localhost/millrace:cpu", "localhost/millrace:next")
        assert set(now["args"]) - set(was["args"]) == {"/models/two", "--max-num-seqs=3"}
        assert set(was["args"]) <= set(now["args"])
        labels = new["template"]["metadata"]["labels"]
        assert labels["millrace.dev/generation"] == "b" and labels["app.kubernetes.io/component"] == f"{role}-b"


def test_a_tag_of_a_generation_goes_before_the_digest_of_all() -> None:
    digest = "sha256:" + "0" * 64
    both = deployments({"image": {"digest": digest}, "generations": {"b": NEXT}})
    images = {name: spec["template"]["spec"]["containers"][0]["image"] for name, spec in both.items()}
    assert images["millrace-decode"].endswith(digest) and images["millrace-decode-b"].endswith(":next")


def test_a_roll_of_the_same_build_replaces_pods_one_by_one_and_new_ones_first() -> None:
    for spec in deployments({"generations": {"b": NEXT}}).values():
        assert spec["strategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_a_generation_whose_model_is_on_the_hub_may_fetch_it() -> None:
    given = {"model": {"name": "/models/one", "volume": {"emptyDir": {}}}}
    hub = {"generations": {"b": {"model": {"name": "org/model"}}}}
    names = [
        {one["metadata"]["name"] for one in of_kind(render(values)[0], "NetworkPolicy")}
        for values in (given, given | hub)
    ]
    assert names[1] - names[0] == {"millrace-hub"}


def test_the_workers_of_every_generation_are_scraped() -> None:
    given = {"generations": {"b": NEXT}, "monitoring": {"podMonitor": {"enabled": True}}}
    (monitor,) = of_kind(render(given)[0], "PodMonitor")
    (chosen,) = monitor["spec"]["selector"]["matchExpressions"]
    assert {"prefill", "decode", "prefill-b", "decode-b"} <= set(chosen["values"])
