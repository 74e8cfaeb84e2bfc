"""An HTML report in a real browser: it can be searched, sorted and opened, draws its charts, and asks for nothing."""

from __future__ import annotations

import base64
import re
from dataclasses import replace
from typing import Any

import pytest

from pytest_gpumem.facts.values.composition import Composition, Explanation, Holder, Row
from pytest_gpumem.facts.values.times import Round, Sample, Times
from pytest_gpumem.judging.gate.verdict import Cell, MetricVerdict, Outcome
from pytest_gpumem.reporting.reports.escaping import visible
from pytest_gpumem.reporting.reports.html.document import in_lines
from pytest_gpumem.reporting.reports.html.page import anchor_of, html
from tests.browser.conftest import INK, prefer
from tests.browser.reports import FAILURE, explained, many, small
from tests.hostile import TEXTS
from tests.reports.sessions import GB, OK, REGRESSED, everything, measured, peak, result, session

SMALL = small()
TEXTS_ONLY = session(replace(REGRESSED, failed=False), OK)
"""Without charts, as plotly takes longest to start. No test is open at first: one has regressed, and did not fail for it."""
NAMES = "[...document.querySelectorAll('tbody[data-outcome]')].filter((one) => !one.hidden).map((one) => one.querySelector('bdi').textContent)"
OPEN_DETAILS = "document.querySelectorAll('details').forEach((one) => { one.open = true; })"
PAINTED = "new Promise((done) => requestAnimationFrame(() => setTimeout(done)))"
CUT_OFF = (
    "[...document.querySelectorAll('.plot .main-svg')].filter((one) => one.getBoundingClientRect().right > innerWidth)"
)
OPEN_TESTS = (
    "document.querySelectorAll('tbody[data-outcome] th button[aria-expanded=false]').forEach((one) => one.click())"
)
PANEL = "tbody[data-outcome] td.panel"
WIDE = f"document.querySelector('{PANEL} .wide')"


def shown(page: Any) -> list[str]:
    """The tests in the table, from above."""
    return page.evaluate(NAMES)


def drawn(page: Any, within: str) -> int:
    """How many charts there are, after each of them has lines or points."""
    charts = page.locator(f"{within} figure.chart")
    for number in range(charts.count()):
        charts.nth(number).locator("svg .trace path").first.wait_for(state="attached")
    return charts.count()


def brightness(color: str) -> float:
    """Of an ``rgb(...)``, from 0 to 255."""
    return sum(map(int, re.findall(r"\d+", color)[:3])) / 3


def test_opening_a_panel_draws_its_chart_in_the_theme_of_the_system(opens):
    page = opens(SMALL, color_scheme="dark")
    assert page.title() == f"The gate failed: {SMALL.accounting.removeprefix('gpumem: ')}"
    assert page.evaluate("[typeof Plotly, document.querySelectorAll('.plot').length]") == ["undefined", 1]
    for button in page.locator("tbody[data-outcome] th button").all():
        button.click()
    assert page.locator(PANEL).count() == 5
    assert drawn(page, PANEL) == 4
    assert page.locator(".over_time .trace").count() >= 6
    page.locator("details.matrix summary").click()
    assert drawn(page, "details.matrix") == 1
    assert "24 x float32[8, 12, 1024, 1024]" in page.locator(PANEL).first.inner_text()
    assert "was bfloat16, now float32" in page.locator(PANEL).first.inner_text()
    colors = "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color, getComputedStyle(document.querySelector('.legendtext')).fill]"
    paper, ink, chart_ink = map(brightness, page.evaluate(colors))
    assert paper < 60
    assert ink > 200
    assert chart_ink > 200
    prefer(page, "light")
    paper, ink, chart_ink = map(brightness, page.evaluate(colors))
    assert paper > 240
    assert max(ink, chart_ink) < 60


def test_failures_come_first_panels_close_again_and_print_shows_no_buttons(opens):
    page = opens(TEXTS_ONLY)
    assert shown(page) == ["test_b", "test_a"]
    button = page.locator("tbody[data-outcome] th button").first
    button.click()
    assert button.get_attribute("aria-expanded") == "true"
    page.get_by_text("The full text of the failure").click()
    assert page.locator("pre.failure").inner_text() == REGRESSED.verdict.failure
    button.click()
    assert button.get_attribute("aria-expanded") == "false"
    assert not page.locator("pre.failure").is_visible()
    button.click()
    page.evaluate(OPEN_DETAILS)
    page.emulate_media(media="print")
    assert not page.locator(".filters").is_visible()
    assert not page.locator("button.copy").is_visible()
    assert page.locator("pre.failure").is_visible()


def test_tests_are_searched_and_filtered_and_sorted_by_mouse_and_by_keyboard(opens):
    page = opens(SMALL)
    page.get_by_label("Search").fill("gpt BF16")
    assert shown(page) == ["test_b[amp-bf16]"]
    assert page.locator("#shown").inner_text() == "1 of 5 tests"
    page.get_by_label("Search").fill("no such test")
    assert shown(page) == []
    page.get_by_role("button", name="Show all").click()
    assert len(shown(page)) == 5
    assert page.locator("#shown").inner_text() == "5 tests"
    page.get_by_label("improved").click()
    assert shown(page) == ["test_c"]
    page.get_by_label("unmeasured").focus()
    page.keyboard.press("Space")
    assert set(shown(page)) == {"test_c", "test_d"}
    page.get_by_label("improved").click()
    assert shown(page) == ["test_d"]
    page.get_by_label("unmeasured").click()
    # What has no figure comes last.
    by_size = ["test_b[fp32]", "test_b[amp-bf16]", "test_a", "test_c"]
    page.get_by_role("button", name="Peak", exact=True).click()
    assert shown(page) == [*by_size, "test_d"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.keyboard.press("Enter")
    assert shown(page) == [*reversed(by_size), "test_d"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "ascending"
    page.get_by_role("button", name="Test", exact=True).focus()
    page.keyboard.press("Space")
    assert shown(page) == ["test_a", "test_b[amp-bf16]", "test_b[fp32]", "test_d", "test_c"]
    for button in page.locator("table.tests > thead button").all():
        before = page.locator("th[aria-sort]").inner_text()
        button.click()
        assert page.locator("th[aria-sort]").count() == 1
        assert len(shown(page)) == 5, before


def test_the_keyboard_reaches_filters_and_opens_a_test_with_visible_focus(opens):
    page = opens(TEXTS_ONLY)
    page.get_by_label("Search").focus()
    for number in range(3):
        outlined = page.evaluate("""(() => {
            const one = document.activeElement.closest('.chip') || document.activeElement;
            const { outlineStyle, outlineWidth, outlineColor, borderColor } = getComputedStyle(one);
            return [one.tagName, outlineStyle, outlineWidth, outlineColor, borderColor];
        })()""")
        focus = "rgb(36, 88, 166)"
        assert outlined == ["LABEL" if number else "INPUT", "solid", "2px", focus, focus]
        page.keyboard.press("Tab")
    page.locator("table.tests > thead button").last.focus()
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator(PANEL).is_visible()
    style = page.evaluate(
        "(({outlineStyle, outlineWidth}) => [outlineStyle, outlineWidth])(getComputedStyle(document.activeElement))"
    )
    assert style == ["solid", "2px"]


@pytest.mark.parametrize(
    ("report", "fragment", "opened"),
    [
        (session(REGRESSED, OK), "", ["test_b"]),
        (session(OK, REGRESSED), f"#{anchor_of('tests/test_gpt.py::test_a')}", ["test_a"]),
        (session(REGRESSED, result(measured(peak(Outcome.OVER_BUDGET)), test="test_c", failure="over")), "", []),
        (session(OK), "", []),
    ],
    ids=["one failed", "a link to another", "two failed", "none failed"],
)
def test_the_only_test_that_failed_is_open_at_first(opens, report, fragment, opened):
    page = opens(report, fragment=fragment)
    names = page.locator("tbody[data-outcome]:has(button[aria-expanded=true]) bdi")
    assert names.all_inner_texts() == opened
    assert page.locator(f"{PANEL}:visible").count() == len(opened)


@pytest.mark.parametrize("width", [375, 1400])
def test_what_explains_a_failure_stands_above_its_metrics_and_names_fit_their_column(opens, width):
    metric = MetricVerdict("retained", Outcome.REGRESSED, 4 * GB, 0, 64_000)
    kept = Composition(4 * GB, (Row("other", 4 * GB, site="cache.py:5"),))
    explanation = Explanation(Composition(0, ()), kept, holders=(Holder("cache.kept[...]", kept),))
    failed = result(measured(peak(Outcome.OK), metric, measurement={"explanation": explanation}), failure="it kept")
    page = opens(session(failed), width=width)
    titles = page.locator(f"{PANEL} h4").all_inner_texts()
    assert titles.index("What was retained: 4.00 GB") < titles.index("Metrics")
    assert page.locator("tbody[data-outcome] td.number.bad").first.inner_text().split() == ["retained", "+4.00", "GB"]
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_name_of_a_detail_is_not_broken_within_a_word_beside_a_long_value(opens):
    page = opens(small(), width=1300)
    height = """([name, value]) => {
        const [dt, dd] = document.querySelector('.details div').children;
        [dt.textContent, dd.textContent] = [name, value];
        const range = document.createRange();
        range.selectNodeContents(dt);
        return range.getClientRects().length;
    }"""
    assert page.evaluate(height, ["machine", "Intel(R) Xeon(R) Processor, 2 cores"]) == 1
    page.evaluate(height, ["n" * 300, "v" * 300])
    assert page.evaluate("document.documentElement.scrollWidth") <= 1300


def test_causes_come_first_and_open_their_tests_and_the_chart_of_the_largest(opens):
    grown = [result(explained(), test=test, failure=FAILURE) for test in ("test_a", "test_b[amp-bf16]")]
    page = opens(session(*grown))
    assert page.locator("main h2").first.inner_text() == "Causes"
    assert page.locator(".cause .chart svg").count() == 0
    page.locator(".cause summary").click()
    assert drawn(page, ".cause") == 1
    page.set_viewport_size({"width": 375, "height": 800})
    page.wait_for_function("document.documentElement.scrollWidth <= 375")
    page.locator(".cause a", has_text="test_b[amp-bf16]").click()
    page.locator("td.panel:visible h3").first.wait_for()
    assert page.locator("tbody[data-outcome] button[aria-expanded=true]").inner_text().endswith("test_b[amp-bf16]")


def test_a_link_to_a_test_opens_it_and_an_open_test_is_in_the_address(opens):
    a, b = (anchor_of(f"tests/test_gpt.py::test_{name}") for name in "ab")
    page = opens(TEXTS_ONLY, fragment=f"#{a}")
    assert page.locator(f"#{a} td.panel").is_visible()
    assert page.locator(PANEL).count() == 1
    page.locator(f"#{b} th button").click()
    assert page.url.endswith(f"#{b}")


def test_a_test_opens_while_some_text_elsewhere_is_marked_but_not_when_its_own_is(opens):
    page = opens(TEXTS_ONLY)
    button = page.locator("tbody[data-outcome] th button").first
    page.evaluate("getSelection().selectAllChildren(document.querySelector('.accounting'))")
    for expanded in ("true", "false"):
        button.focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-expanded") == expanded
    page.get_by_label("Search").fill("test_b")
    page.keyboard.press("Control+A")
    button.evaluate("(one) => one.click()")
    assert button.get_attribute("aria-expanded") == "true"
    row = "document.querySelector('tbody[data-outcome] tr')"
    page.evaluate(f"getSelection().selectAllChildren({row}.cells[2]); {row}.cells[2].click()")
    assert button.get_attribute("aria-expanded") == "true"
    page.evaluate(f"getSelection().removeAllRanges(); {row}.cells[2].click()")
    assert button.get_attribute("aria-expanded") == "false"


def test_an_address_that_is_no_link_of_the_page_is_no_error(opens):
    assert shown(opens(TEXTS_ONLY, fragment="#%")) == ["test_b", "test_a"]


def test_what_was_drawn_for_a_narrow_screen_is_drawn_anew_for_a_wide_one(opens):
    page = opens(SMALL, width=375)
    page.locator("details.matrix summary").click()
    drawn(page, "details.matrix")
    assert page.locator(".matrix .textpoint").count() == 0
    page.set_viewport_size({"width": 1400, "height": 900})
    page.locator(".matrix .textpoint").first.wait_for(state="attached")
    # Closed, it has no width, and is not drawn for any.
    page.locator("details.matrix summary").click()
    page.emulate_media(color_scheme="dark")
    page.evaluate(PAINTED)
    page.locator("details.matrix summary").click()
    page.locator(f".matrix .legendtext[style*='{INK['dark']}']").first.wait_for()
    assert page.locator(".matrix .textpoint").count() == 2


def test_the_command_that_accepts_can_be_copied(opens):
    page = opens(TEXTS_ONLY, permissions=["clipboard-read", "clipboard-write"])
    page.locator("tbody[data-outcome] th button").first.click()
    page.get_by_role("button", name="Copy the command").click()
    page.get_by_text("copied").wait_for()
    command = 'pytest "tests/test_gpt.py::test_b" --gpumem-update=all'
    assert page.evaluate("navigator.clipboard.readText()") == command


def test_hostile_texts_have_no_effect_and_long_texts_never_widen_the_page(opens):
    texts = [text for name, text in TEXTS.items() if name != "long"]
    page = opens(everything("\n".join([*texts, "x" * 300])), width=375)
    page.evaluate(OPEN_TESTS)
    page.evaluate(OPEN_DETAILS)
    charts = drawn(page, "body")
    assert charts >= 4
    ours = "[document.scripts, document.querySelectorAll('img, b:not(.fails, .spared), iframe, a:not(.skip):not([href^=\"#\"]), [onerror]')].map((some) => some.length)"
    scripts, foreign = page.evaluate(ours)
    # Those of the package, plotly's twice: as text and as it runs.
    assert scripts == charts + 4
    assert foreign == 0
    for width, scheme in ((375, "light"), (1400, "dark")):
        page.set_viewport_size({"width": width, "height": 900})
        # Has the charts drawn anew, which would otherwise wait until nobody changes the size any more.
        prefer(page, scheme)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        # A plot that is cut off would not make the page any wider.
        assert page.evaluate(f"{CUT_OFF}.length") == 0


def test_without_scripts_everything_is_there_but_the_charts(opens):
    page = opens(SMALL, java_script_enabled=False)
    assert page.locator("tbody[data-outcome]").count() == 5
    assert page.locator("h2.alone").all_inner_texts()[0] == "tests/test_gpt.py::test_b[amp-bf16]"
    assert page.locator("pre.failure").all_text_contents() == [FAILURE] * 2
    assert page.locator("table.metrics").first.is_visible()


def test_a_thousand_tests_are_few_nodes_until_they_are_opened(opens):
    report = many(1000, every=10)
    text = html(report)
    plotly = (
        len(text)
        - len(text.partition('id="plotly">')[0])
        - len(text.partition('id="plotly">')[2].partition("</script>")[2])
    )
    assert (len(text) - plotly) / 1000 < 8_000, "bytes a test"
    page = opens(report)
    assert page.evaluate("document.querySelectorAll('*').length") < 18 * 1000
    assert page.evaluate("[typeof Plotly, document.querySelectorAll('svg').length]") == ["undefined", 0]


def test_nothing_of_hostile_texts_takes_effect_and_all_of_them_are_shown(opens):
    tests = [
        result(measured(peak(Outcome.REGRESSED)), test=f"{name} {text}", failure=f"{name} {text}")
        for name, text in TEXTS.items()
    ]
    page = opens(session(*tests))
    page.evaluate(OPEN_TESTS)
    ids, failures = page.evaluate(
        f"[{NAMES}, [...document.querySelectorAll('pre.failure')].map((one) => one.textContent)]"
    )
    for name, text in TEXTS.items():
        written = text.encode("unicode_escape").decode()
        assert [one for one in ids if one.startswith(f"{name} ")] == [visible(f"{name} {text}")], written
        assert in_lines(f"{name} {text}") in failures, written


def test_what_plotly_would_take_for_markup_or_a_formula_is_text(opens):
    configs = ["<b>x</b>&amp;", "$f$ %{x}", "<a href='http://example.com'>y</a>"]
    tests = [
        result(explained(seconds=1 + number), test=f"test_m[{number}]", cell=Cell("t.py::test_m", config, number))
        for number, config in enumerate(configs)
    ]
    page = opens(session(*tests))
    page.evaluate(OPEN_DETAILS)
    drawn(page, "details.matrix")
    labels = page.locator(".matrix .textpoint").all_text_contents()
    assert sorted(labels) == sorted(one if len(one) <= 40 else f"{one[:40]}…" for one in configs)
    assert page.locator(".plot a, .plot b").count() == 0


def test_no_script_but_those_of_the_package_runs_and_nothing_is_fetched(opens):
    page = opens(SMALL, watched=False)
    page.evaluate("""() => {
        window.violated = [];
        document.addEventListener("securitypolicyviolation", (event) => violated.push(event.effectiveDirective));
        const script = document.createElement("script");
        script.textContent = "window.broken = 1";
        document.body.append(script);
        document.body.insertAdjacentHTML("beforeend", "<img src='x.png' onerror='window.broken = 2'>");
        return fetch("https://example.com").catch(() => {});
    }""")
    page.evaluate(PAINTED)
    assert page.evaluate("window.broken") is None
    assert {"connect-src", "img-src", "script-src-elem", "script-src-attr"} <= set(page.evaluate("violated"))


# What a reader looks for.


def test_the_memory_chart_draws_the_baseline_and_a_near_budget_and_whole_rounds(opens):
    far = replace(explained().metrics[0], budget=100 * GB)
    few = measured(peak(Outcome.OK), measurement={"times": Times((Sample((Round(0.5), Round(0.51), Round(0.5))),))})
    drawn_twice = (result(explained()), result(replace(explained(), metrics=(far,)), test="test_z"))
    page = opens(session(*drawn_twice, result(few, test="test_few")))
    page.evaluate(OPEN_TESTS)
    assert drawn(page, PANEL) == 5
    assert ["1", "2", "3"] in [
        chart.locator(".xtick text").all_text_contents() for chart in page.locator(".rounds").all()
    ]
    legends = [chart.locator(".legendtext").all_text_contents() for chart in page.locator(f"{PANEL} .over_time").all()]
    assert sorted(legend[2:] for legend in legends) == [["baseline 8.12 GB"], ["baseline 8.12 GB", "budget 12.00 GB"]]
    tops = page.evaluate(
        f"[...document.querySelectorAll('{PANEL} .over_time .plot')].map((one) => one._fullLayout.yaxis.range[1])"
    )
    assert 8.12 < min(tops) < 12 < max(tops) < 14


BRIGHTNESS_AT = """async ([picture, side]) => {
  const image = new Image();
  image.src = `data:image/png;base64,${picture}`;
  await image.decode();
  const context = new OffscreenCanvas(image.width, image.height).getContext("2d");
  context.drawImage(image, 0, 0);
  // The outermost column may be shared with what is beside the table.
  const { data } = context.getImageData(side === "right" ? image.width - 2 : 1, 0, 1, image.height);
  const points = Array.from({ length: image.height }, (_, at) => (data[4 * at] + data[4 * at + 1] + data[4 * at + 2]) / 3);
  return points.sort((one, other) => one - other)[Math.floor(image.height / 2)];
}"""


def edge(page: Any, side: str) -> float:
    """The median brightness, from 0 to 255, of the first or last column of what is seen of the first table of metrics."""
    picture = base64.b64encode(page.locator(f"{PANEL} .wide").first.screenshot()).decode()
    return page.evaluate(BRIGHTNESS_AT, [picture, side])


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.thorough)])
def test_a_table_that_is_wider_than_the_screen_has_a_shadow_where_there_is_more(opens, scheme):
    page = opens(session(REGRESSED), width=375, color_scheme=scheme)
    page.evaluate(OPEN_TESTS)
    plain = brightness(page.evaluate(f"getComputedStyle(document.querySelector('{PANEL}')).backgroundColor"))
    assert page.evaluate(f"(({{scrollWidth, clientWidth}}) => scrollWidth - clientWidth)({WIDE})") > 100
    assert edge(page, "right") < 0.85 * plain <= edge(page, "left") + 2
    page.evaluate(f"{WIDE}.scrollLeft = 10000")
    assert edge(page, "left") < 0.85 * plain <= edge(page, "right") + 2


def test_the_legend_of_the_bars_takes_two_lines_on_a_narrow_screen(opens):
    page = opens(session(result(replace(explained(), measurement=measured().measurement))), width=375)
    page.evaluate(OPEN_TESTS)
    legend = page.locator(f"{PANEL} .legend")
    lines = {round(one.bounding_box()["y"]) for one in legend.locator("span").all()}
    assert legend.inner_text().split("\n")[:4] == ["now", "baseline", "allowed", "budget"]
    assert len(lines) == 2
    assert legend.bounding_box()["height"] < 48


def test_what_is_allowed_stands_beside_its_bar(opens):
    page = opens(session(REGRESSED))
    page.evaluate(OPEN_TESTS)
    row = page.locator(f"{PANEL} .metrics tbody tr").first
    bar, allowed = row.locator(".track").bounding_box(), row.get_by_text("+0.5 %").bounding_box()
    assert 0 < allowed["x"] - (bar["x"] + bar["width"]) < 30
    swatch = page.locator(".legend .allowed").bounding_box()
    legend = page.locator(".legend span", has_text="allowed").bounding_box()
    assert abs(swatch["y"] + swatch["height"] / 2 - legend["y"] - legend["height"] / 2) < 2
