"""POD against an independent implementation, against its own definition, and where nothing can be said."""

import math

import numpy as np
import pytest

from weldtrain.metrics.pod import NoPod, _chi2_beyond, fit_pod, resampled_sizes

LINKS = ("logit", "probit")
SCALES = ("log", "linear")


def simulated(seed, n=200, a50=2.0, slope=3.0, link="logit", scale="log"):
    """Sizes from 0.2 to 8, found with the probability of a curve through a50."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(np.log(0.2), np.log(8), n))
    z = slope * (np.log(sizes / a50) if scale == "log" else sizes - a50)
    p = 1 / (1 + np.exp(-z)) if link == "logit" else np.array([0.5 * math.erfc(-v / math.sqrt(2)) for v in z])
    return sizes, rng.random(n) < p


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("seed", range(4))
def test_it_is_what_statsmodels_finds(link, scale, seed):
    sm = pytest.importorskip("statsmodels.api")
    sizes, detected = simulated(seed, scale=scale)
    pod = fit_pod(sizes, detected, link, scale)
    x = sm.add_constant(np.log(sizes) if scale == "log" else sizes)
    family = sm.families.Binomial(link=(sm.families.links.Logit if link == "logit" else sm.families.links.Probit)())
    expected = sm.GLM(detected.astype(float), x, family=family).fit(tol=1e-12)
    assert [pod.b0, pod.b1] == pytest.approx(expected.params, rel=1e-6)
    assert pod.covariance == pytest.approx(expected.cov_params(), rel=1e-4)
    assert pod.log_likelihood == pytest.approx(expected.llf, rel=1e-9)
    assert pod.curve(sizes) == pytest.approx(expected.predict(x), abs=1e-7)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("scale", SCALES)
def test_its_sizes_are_those_of_its_curve(link, scale):
    pod = fit_pod(*simulated(1, scale=scale), link, scale)
    assert pod.curve([pod.a50, pod.a90]) == pytest.approx([0.5, 0.9])
    assert pod.a50 < pod.a90 < pod.a90_95 and pod.a90 < pod.a90_95_wald
    sizes = np.linspace(0.2, 8, 50)
    assert (pod.lower(sizes) < pod.curve(sizes)).all() and (np.diff(pod.curve(sizes)) >= 0).all()


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("seed", range(3))
def test_the_bound_is_where_the_likelihood_ratio_says(link, seed):
    """The likelihood of the best curve through (a, 0.9), found by trying slopes one by one."""
    sizes, detected = simulated(seed, n=80)
    pod = fit_pod(sizes, detected, link)
    at = {"logit": math.log(9), "probit": 1.2815515655446004}[link]

    def best_through(a):
        values = []
        for slope in np.linspace(0.01, 12, 6000):
            z = at + slope * np.log(sizes / a)
            p = 1 / (1 + np.exp(-z)) if link == "logit" else 0.5 * np.vectorize(math.erfc)(-z / math.sqrt(2))
            values.append(np.log(np.where(detected, p, 1 - p).clip(1e-300)).sum())
        return max(values)

    assert 2 * (pod.log_likelihood - best_through(pod.a90_95)) == pytest.approx(2.7055, abs=2e-3)


def test_equal_sizes_count_together():
    sizes, detected = np.repeat([1.0, 2.0, 4.0], 20), np.concatenate([np.arange(20) < n for n in (4, 11, 18)])
    pod = fit_pod(sizes, detected)
    shuffled = np.random.default_rng(0).permutation(60)
    again = fit_pod(sizes[shuffled], detected[shuffled])
    assert (pod.a90, pod.a90_95, pod.defects, pod.hits) == pytest.approx((again.a90, again.a90_95, 60, 33))
    for unit in (1e-3, 1e4):  # what sizes are measured in does not matter
        scaled = fit_pod(unit * sizes, detected)
        assert (scaled.a50, scaled.a90_95) == pytest.approx((unit * pod.a50, unit * pod.a90_95), rel=1e-6)


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("scale", SCALES)
def test_a_resample_is_fitted_as_the_same_defects_again(link, scale, monkeypatch):
    monkeypatch.setattr("weldtrain.metrics.pod._ENTRIES", 1000)  # several chunks
    sizes, detected = simulated(1, link=link, scale=scale)
    sizes, picture = sizes.round(2), np.arange(200) // 4
    pod = fit_pod(sizes, detected, link, scale)
    weights = np.concatenate([np.ones((1, 50), np.uint16), np.random.default_rng(0).poisson(1, (20, 50)).astype(np.uint16)])
    told = resampled_sizes(pod, sizes, detected, picture, weights)
    assert (told["a50"][0], told["a90"][0]) == pytest.approx((pod.a50, pod.a90), rel=5e-3)  # sizes to a hundredth
    for i, times in enumerate(weights.astype(int)):
        again = fit_pod(np.repeat(sizes, times[picture]), np.repeat(detected, times[picture]), link, scale)
        assert (told["a50"][i], told["a90"][i]) == pytest.approx((again.a50, again.a90), rel=5e-3)


def test_resamples_of_which_there_is_no_curve():
    sizes, detected = simulated(0, n=100)
    pod, picture = fit_pod(sizes, detected), np.arange(100)
    small_found, large_missed = detected & (sizes < 1.5), ~detected & (sizes > 2.5)
    small_missed, large_found = ~detected & (sizes < 1), detected & (sizes > 4)
    weights = np.stack([detected, ~detected, small_found | large_missed, small_missed | large_found]).astype(np.uint16)
    a90 = resampled_sizes(pod, sizes, detected, picture, weights)["a90"]
    assert np.isnan(a90[:2]).all() and np.isinf(a90[2]) and 0.8 < a90[3] < 4


def test_the_parameters_of_a_large_simulation_come_back_fast():
    sizes, detected = simulated(3, n=100_000, a50=2.0, slope=3.0)
    pod = fit_pod(sizes, detected)
    assert (pod.a50, pod.b1) == pytest.approx((2.0, 3.0), rel=0.03) and pod.a90 == pytest.approx(2 * 9 ** (1 / 3), rel=0.03)
    assert pod.a90_95 == pytest.approx(pod.a90, rel=0.02) and not pod.warnings


@pytest.mark.parametrize("link", LINKS)
def test_the_bound_lies_above_the_true_size_nineteen_times_of_twenty(link):
    at = {"logit": math.log(9), "probit": 1.2815515655446004}[link]
    true = 2.0 * math.exp(at / 3.0)
    bounds = np.array([fit_pod(*simulated(seed, n=120, link=link), link).a90_95 for seed in range(400)])
    assert 0.92 <= (bounds >= true).mean() <= 0.98  # three standard deviations of 400 draws


@pytest.mark.parametrize(("sizes", "detected", "why"), [
    ([1, 2, 3], [0, 1, 1], "3 defects are too few"),
    (range(1, 21), [1] * 20, "all 20 defects were found"),
    (range(1, 21), [0] * 20, "all 20 defects were missed"),
    (range(1, 21), [0] * 10 + [1] * 10, "every defect up to 10 was missed and every one from 11 on found"),
    ([1] * 10 + [2] * 5 + [3] * 5, [0] * 12 + [1] * 8, "from 2 on found"),
    (range(1, 21), [1] * 10 + [0] * 10, "does not rise"),
    (range(1, 21), [1, 0, 1, 1, 1, 1, 0, 1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0], "does not rise"),
    ([5] * 20, [0, 1] * 10, "all defects are of one size"),
    ([0, *range(1, 20)], [0, 1] * 10, "above 0"),
    ([math.nan, *range(1, 20)], [0, 1] * 10, "finite"),
])
def test_where_there_is_no_curve_the_reason_is_said(sizes, detected, why):
    with pytest.raises(NoPod, match=why):
        fit_pod(np.array(list(sizes), float), np.array(detected, bool))


def test_what_speaks_against_a_curve_is_said():
    assert "few" in " ".join(fit_pod(*simulated(0, n=40)).warnings)
    rng = np.random.default_rng(0)
    sizes = rng.uniform(1, 10, 400)
    pod = fit_pod(sizes, rng.random(400) < np.where((sizes > 4) & (sizes < 6), 0.1, 0.2 + 0.06 * sizes), scale="linear")
    assert pod.fit_p < 0.05 and "does not fit" in " ".join(pod.warnings)


def test_a_size_that_hardly_decides_has_no_bound():
    rng = np.random.default_rng(4)
    for _ in range(50):
        sizes, detected = rng.uniform(1, 10, 60), rng.random(60) < 0.6
        try:
            pod = fit_pod(sizes, detected)
        except NoPod:
            continue
        if math.isinf(pod.a90_95):
            assert any("no bound" in warning for warning in pod.warnings)
            return
    pytest.fail("every one of fifty was bounded")


@pytest.mark.parametrize(("x", "freedom"), [(3.841459, 1), (5.991465, 2), (15.50731, 8), (14.06714, 7)])
def test_the_tail_of_chi_square(x, freedom):
    assert _chi2_beyond(x, freedom) == pytest.approx(0.05, rel=1e-5)
