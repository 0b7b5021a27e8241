"""Learning rates: warm-up climbs, schedules end where they say, whatever the number of steps."""

import pytest

from weldtrain.config import SchedulerConfig
from weldtrain.engine.optim import lr_factor


def factors(cfg, total):
    return [lr_factor(step, total, cfg) for step in range(total + 1)]


@pytest.mark.parametrize("name", ["constant", "cosine", "multistep"])
@pytest.mark.parametrize("total", [1, 2, 3, 100])
def test_every_factor_is_a_share(name, total):
    assert all(0 < f <= 1 for f in factors(SchedulerConfig(name=name, warmup=0.3), total))


def test_warmup_climbs_and_cosine_ends_at_final():
    f = factors(SchedulerConfig(name="cosine", warmup=0.1, final=0.01), 100)
    assert f[:10] == sorted(f[:10]) and f[0] < 0.15 and f[10] == 1
    assert f[10:100] == sorted(f[10:100], reverse=True) and f[99] == pytest.approx(0.01)


def test_multistep_falls_at_shares_of_all_steps():
    f = factors(SchedulerConfig(name="multistep", warmup=0, milestones=[0.5, 0.75], gamma=0.1), 100)
    assert f[49] == 1 and f[50] == pytest.approx(0.1) and f[75] == pytest.approx(0.01)
