"""The verdict and the choice of settings, on figures made up by hand."""

import pytest

from weldtrain.data.batch import STAGES
from weldtrain.engine.ledger import BETWEEN, Ledger
from weldtrain.engine.rates import Rate
from weldtrain.engine.step import STEP_STAGES
from weldtrain.engine.tuning import Point, Setting, candidates, choose, search
from weldtrain.engine.verdict import disturbed, judge
from weldtrain.errors import TrainingError

THREADS = Setting("thread", 2, 2, False)


def ledger(**ms):
    values = dict.fromkeys((*STAGES, "pin", "h2d", *STEP_STAGES, "rest"), 0.1) | ms
    return Ledger(values, sum(values.values()), 8)


def point(setting, *windows, cpu_ms=1.0, looks=1):
    return Point(setting, Rate(list(windows), cpu_ms=cpu_ms), looks)


@pytest.mark.parametrize(("slow", "now", "stage"), [
    ("read", THREADS, "read"), ("decode", THREADS, "decode"), ("resize", THREADS, "resize"), ("augment", THREADS, "augment"),
    (None, THREADS._replace(workers="process"), BETWEEN)])
def test_a_slow_loader_is_blamed_by_its_slowest_stage(slow, now, stage):
    costs = ledger(**({slow: 20.0} if slow else {}))
    verdict = judge(costs, 30.0 if slow is None else 0.5, loader_per_s=50, model_per_s=200, trained_per_s=48, gain=4.0,
                    best=now._replace(cache=True), now=now)
    assert (verdict.stage, verdict.limited_by, verdict.share) == (stage, "loader", 0.24)
    assert "24% of the limit" in verdict.sentence and "loader.cache=auto" in verdict.sentence
    assert "predicted 4 times the rate" in verdict.sentence


def test_a_slow_model_is_blamed_whatever_the_loader_costs():
    verdict = judge(ledger(decode=50.0, backward=80.0), 0.5, loader_per_s=300, model_per_s=10, trained_per_s=9.6, gain=1.0,
                    best=THREADS, now=THREADS)
    assert (verdict.stage, verdict.limited_by) == ("backward", "model")
    assert "96% of the limit" in verdict.sentence and "stop tuning" in verdict.sentence


def test_where_loading_takes_the_processor_from_the_model_it_is_not_told_to_stop():
    verdict = judge(ledger(decode=9.0, backward=10.0), None, loader_per_s=60, model_per_s=50, trained_per_s=27, gain=1.8,
                    best=THREADS._replace(cache=True), now=THREADS)
    assert verdict.limited_by == "model" and "stop tuning" not in verdict.sentence
    assert "decoding" in verdict.sentence and "loader.cache=auto" in verdict.sentence


@pytest.mark.parametrize(("before", "trained", "after", "believed"), [
    (10.0, 9.0, 10.5, True), (10.0, 11.0, 9.5, True), (10.0, 9.0, 5.0, False), (0.56, 6.56, 0.6, False), (4.0, 9.0, 10.0, False)])
def test_measurements_that_contradict_each_other_are_not_believed(before, trained, after, believed):
    text = disturbed(before, trained, after)
    assert believed == (not text)
    assert believed or "disturbed this measurement, and its settings are not kept" in text


def test_nothing_is_promised_where_nothing_is_faster():
    verdict = judge(ledger(augment=20.0), 0.5, loader_per_s=50, model_per_s=200, trained_per_s=48, gain=1.02,
                    best=THREADS._replace(num_workers=4), now=THREADS, why_no_cache="loader.cache=auto: off, needs 40 GB")
    assert "predicted" not in verdict.sentence and "augment=light" in verdict.sentence and "needs 40 GB" in verdict.sentence


def test_halving_spends_its_time_on_what_is_fast():
    rates = {setting: 100.0 + i for i, setting in enumerate(candidates(THREADS, 4, cache=True))}
    spent = dict.fromkeys(rates, 0.0)

    def measured(setting, seconds):
        spent[setting] += seconds
        return Rate([rates[setting]] * 4)

    points = search(rates, measured, budget_s=10)
    assert points[0].setting == max(rates, key=rates.get) and len(points) == len(rates)
    assert sum(spent.values()) == pytest.approx(10, rel=0.05)
    assert spent[points[0].setting] > 8 * spent[points[-1].setting]
    assert [p.looks for p in points] == sorted((p.looks for p in points), reverse=True)


def test_the_present_setting_is_always_tried():
    now = Setting("process", 3, 5, True)
    assert candidates(now, 2, cache=True)[0] == now and now in candidates(now, 2, cache=False)


def test_a_setting_that_cannot_start_is_told_and_left_out():
    def measured(setting, seconds):
        if setting.workers == "process":
            raise TrainingError("a loader worker died", "loader.num_workers", "fewer")
        return Rate([50.0])

    points = search([THREADS, THREADS._replace(workers="process")], measured, 1)
    assert "a loader worker died" in points[-1].problem and choose(points, 1e9).setting == THREADS


def test_of_settings_as_good_the_one_that_leaves_most_of_the_processor_is_chosen():
    many, few, slow = THREADS._replace(num_workers=8), THREADS, THREADS._replace(num_workers=1)
    points = [point(many, 1000.0, cpu_ms=3.0), point(few, 990.0, cpu_ms=1.0), point(slow, 400.0, cpu_ms=0.9)]
    assert choose(points, enough=1e9).setting == few
    assert choose(points, enough=300).setting == slow  # the model takes no more than that
    cached = THREADS._replace(cache=True)
    assert choose([*points, point(cached, 980.0, cpu_ms=0.1)], enough=1e9).setting == cached


def test_the_ladder_holds_both_kinds_with_and_without_the_cache():
    tried = candidates(THREADS, 2, cache=True)
    assert len(set(tried)) == len(tried)
    assert {s.num_workers for s in tried} == {0, 1, 2, 4} and {s.workers for s in tried} == {"thread", "process"}
    assert not any(s.cache for s in candidates(THREADS, 2, cache=False))
