"""Sizes, percentages and durations as text: what is read, what is written, and what is refused with which words."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpumem.base.units import (
    SIZES,
    ThroughputLimit,
    counted,
    format_bytes,
    format_bytes_change,
    format_count,
    format_flops,
    format_rate,
    format_ratio,
    format_seconds,
    nearest,
    parse_gigabytes,
    parse_rate,
    parse_ratio,
    parse_seconds,
    parse_size,
    word_form,
)

# No time limit an example: a machine may be slow.
unhurried = settings(deadline=None)


def read_or_message(read, value):
    """What ``read`` makes of the value, or the message of the `ValueError` that it raises; anything else goes up."""
    try:
        return read(value)
    except ValueError as error:
        return str(error)


# Reading sizes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1 B", 1),
        ("1 GB", 1_000_000_000),
        ("1 GiB", 1_073_741_824),
        ("6.5 GB", 6_500_000_000),
        ("  6.5GB ", 6_500_000_000),
        ("+6.5 GB", 6_500_000_000),
        (".5 kB", 500),
        ("5. kB", 5_000),
        ("6.5 gb", 6_500_000_000),
        ("1.0006 kB", 1_001),
        ("1.0004 kB", 1_000),
    ],
)
def test_a_size_is_read_to_the_byte(text, count):
    assert parse_size(text) == count


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("6.5", "'6.5' has no unit; write it like '6.5 GB' or '6.5 MiB'"),
        ("-1 GB", "'-1 GB' is negative; a size is zero or more"),
        ("6.5 octets", "'6.5 octets': unknown unit 'octets'; valid: B, kB, MB, GB, TB, KiB, MiB, GiB, TiB"),
        ("6.5 GBs", "'6.5 GBs': unknown unit 'GBs'; did you mean 'GB'?"),
        ("much", "'much' is not a size; write it like '6.5 GB' or '24 MiB'"),
        ("nan GB", "'nan GB' is not a size; write it like '6.5 GB' or '24 MiB'"),
    ],
)
def test_what_is_no_size_is_named_with_what_would_be_one(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_size(text)


def test_a_size_too_large_for_a_number_is_refused_as_a_size():
    with pytest.raises(ValueError, match="GB"):
        parse_size("9" * 400 + " GB")


@unhurried
@given(st.text() | st.from_regex(r"[+-]?[0-9.]{0,6} ?[A-Za-z%]{0,4}", fullmatch=True))
def test_any_text_is_a_size_or_a_value_error_that_quotes_it(text):
    result = read_or_message(parse_size, text)
    assert result >= 0 if isinstance(result, int) else repr(text) in result


@unhurried
@given(st.integers(0, 10**15), st.sampled_from(sorted(SIZES)))
def test_whole_numbers_of_any_unit_are_read_exactly(number, unit):
    # Beyond 2**53 bytes a float no longer counts single ones.
    if number * SIZES[unit] < 2**53:
        assert parse_size(f"{number} {unit}") == number * SIZES[unit]


@pytest.mark.parametrize(("number", "count"), [(0, 0), (6.5, 6_500_000_000), (1e-9, 1)])
def test_a_number_of_gigabytes_is_decimal(number, count):
    assert parse_gigabytes(number) == count


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (-1, "-1 is negative; a number of GB is zero or more"),
        (float("nan"), "nan is not a finite number of GB"),
        (float("inf"), "inf is not a finite number of GB"),
        (True, "True is not a number of GB; write 6.5, or use max_memory='6.5 GiB'"),
        ("6.5", "'6.5' is not a number of GB; write 6.5, or use max_memory='6.5 GB'"),
        ("60 MB", "'60 MB' is not a number of GB; write 0.06, or use max_memory='60 MB'"),
        ("24 GiB", "'24 GiB' is not a number of GB; write 25.769803776, or use max_memory='24 GiB'"),
        ("60 MP", "'60 MP' is not a number of GB; write 6.5, or use max_memory='6.5 GiB'"),
        (None, "None is not a number of GB; write 6.5, or use max_memory='6.5 GiB'"),
    ],
)
def test_what_is_no_number_of_gigabytes_is_named_with_the_value_in_gb(number, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_gigabytes(number)


@unhurried
@given(st.floats() | st.integers())
def test_any_number_is_gigabytes_or_a_value_error(number):
    result = read_or_message(parse_gigabytes, number)
    if isinstance(result, int):
        assert result == pytest.approx(number * 10**9, abs=0.5)
    else:
        assert repr(number) in result


@pytest.mark.parametrize("number", [1e308, 10**400], ids=["float", "int"])
def test_a_number_of_gigabytes_too_large_to_count_is_a_value_error(number):
    with pytest.raises(ValueError, match="GB"):
        parse_gigabytes(number)


# Reading percentages


@pytest.mark.parametrize(
    ("text", "ratio"),
    [("2 %", 0.02), ("0 %", 0.0), (" 12.5 % ", 0.125)],
)
def test_a_percentage_is_a_ratio(text, ratio):
    assert parse_ratio(text) == ratio


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0.02", "'0.02' is not a percentage; write it like '2 %'"),
        ("two %", "'two %' is not a percentage; write it like '2 %'"),
        ("٢ %", "'٢ %' is not a percentage; write it like '2 %'"),
        (0.02, "0.02 is not a percentage; write it like '2 %'"),
        ("-2 %", "'-2 %' is negative; a percentage here is zero or more"),
    ],
)
def test_what_is_no_percentage_is_named(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_ratio(text)


# Writing


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (-3, "-3 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),
        (1_006, "1.01 kB"),
        (999_994, "999.99 kB"),
        (999_996, "1.00 MB"),
        (8_120_000_000, "8.12 GB"),
        (1_234_000_000_000_000, "1234.00 TB"),
    ],
)
def test_bytes_are_shown_in_the_largest_decimal_unit_that_keeps_them_at_one_or_more(count, text):
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (1_023, "1023 B"),
        (1_024, "1.00 KiB"),
        (1_048_575, "1.00 MiB"),
        (2**40, "1.00 TiB"),
    ],
)
def test_the_same_bytes_are_fewer_binary_units(count, text):
    assert format_bytes(count, "iec") == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 FLOP"),
        (1_234_000_000, "1.23 GFLOP"),
        (-20_740, "-20.74 kFLOP"),
        (6 * 10**18, "6000.00 PFLOP"),
    ],
)
def test_flops_are_shown_in_decimal_units(count, text):
    assert format_flops(count) == text


@pytest.mark.parametrize(("count", "text"), [(1_284, "1,284"), (-1_284, "-1,284")])
def test_counts_are_shown_whole(count, text):
    assert format_count(count) == text


@unhurried
@given(st.integers(-(10**14), 10**14), st.sampled_from(["si", "iec"]))
def test_no_size_is_shown_as_a_thousand_of_a_unit_that_has_a_larger_one(count, system):
    number, unit = format_bytes(count, system).split()
    base = 1000 if system == "si" else 1024
    assert abs(float(number)) < base
    assert unit == "B" or abs(float(number)) >= 1


@unhurried
@given(st.integers(0, 10**14), st.sampled_from(["si", "iec"]))
def test_what_is_shown_reads_as_what_was_within_half_of_the_last_digit(count, system):
    text = format_bytes(count, system)
    unit = SIZES[text.split()[1]]
    assert abs(parse_size(text) - count) <= (0.005 * unit + 1 if unit > 1 else 0)


@unhurried
@given(st.integers(0, 10**14), st.sampled_from(["si", "iec"]))
def test_what_was_shown_and_read_is_shown_alike(count, system):
    text = format_bytes(count, system)
    assert format_bytes(parse_size(text), system) == text


@unhurried
@given(st.integers(0, 10**14), st.integers(0, 10**14))
def test_the_larger_of_two_sizes_never_reads_as_the_smaller(one, other):
    small, large = sorted((one, other))
    assert parse_size(format_bytes(small)) <= parse_size(format_bytes(large))


@pytest.mark.parametrize(
    ("change", "system", "text"),
    [
        (1_190_000_000, "si", "+1.19 GB"),
        (0, "si", "+0 B"),
        (-1_190_000_000, "si", "-1.19 GB"),
        (2**30, "iec", "+1.00 GiB"),
    ],
)
def test_a_change_of_bytes_has_its_sign(change, system, text):
    assert format_bytes_change(change, system) == text


@pytest.mark.parametrize(
    ("ratio", "text"),
    [
        (0.147, "+14.7 %"),
        (-0.147, "-14.7 %"),
        (0.0, "+0.0 %"),
        (98.9, "+9890.0 %"),
        (99.0, "100 times"),
        (62914.6, "62,916 times"),
        (float("inf"), "+inf %"),
    ],
)
def test_a_ratio_is_a_signed_percentage_or_a_factor(ratio, text):
    assert format_ratio(ratio) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 µs"),
        (0.00084, "840.00 µs"),
        (0.000_999_999, "1.00 ms"),
        (0.001, "1.00 ms"),
        (0.999_999, "1.00 s"),
        (120.0, "120.00 s"),
    ],
)
def test_seconds_are_shown_in_the_largest_unit_that_keeps_them_at_one_or_more(seconds, text):
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(1200.4, "1200 /s"), (3.42, "3.42 /s"), (0.0342, "0.0342 /s"), (99.96, "100 /s")],
)
def test_a_rate_has_the_digits_that_mean_something(rate, text):
    assert format_rate(rate) == text


# Suggestions


def test_the_nearest_word_is_suggested():
    assert nearest("max_gbb", ["max_gb", "max_memory"]) == "did you mean 'max_gb'?"


def test_all_words_are_listed_when_none_is_near():
    assert nearest("zebra", ["max_gb", "max_memory"]) == "valid: max_gb, max_memory"


# Rates and durations


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("1200 samples/s", ThroughputLimit(1200, "samples")),
        ("3.5e4 tokens/s", ThroughputLimit(35000, "tokens")),
        ("1_200.5 Items/s", ThroughputLimit(1200.5, "items")),
        (" .5steps / s ", ThroughputLimit(0.5, "steps")),
    ],
)
def test_a_rate_is_so_many_of_something_a_second(text, rate):
    assert parse_rate(text) == rate


@pytest.mark.parametrize(
    "rate", [ThroughputLimit(1200, "samples"), ThroughputLimit(0.5, "steps"), ThroughputLimit(3.5e9, "tokens")]
)
def test_a_rate_reads_as_it_is_written(rate):
    assert parse_rate(str(rate)) == rate


@pytest.mark.parametrize(
    "text",
    ["1200 samples", "samples/s", "-3 steps/s", "1,5 steps/s", "٢ steps/s", "-8", True, None],
)
def test_what_is_no_rate_is_told_how_to_write_one(text):
    message = f"{text!r} is not a rate; write it like '1200 samples/s', '35000 tokens/s' or '8 steps/s'"
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("8 step/s", "'8 step/s': unknown 'step'; did you mean 'steps'?"),
        ("8 frogs/s", "'8 frogs/s': unknown 'frogs'; valid: samples, tokens, steps, items"),
        ("0 steps/s", "'0 steps/s' is not a rate above zero"),
        ("1e999 steps/s", "'1e999 steps/s' is not a rate above zero"),
    ],
)
def test_a_rate_of_nothing_or_of_something_unknown_is_told(text, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        parse_rate(text)


@pytest.mark.parametrize(("text", "seconds"), [("2 s", 2.0), ("500 ms", 0.5), ("1.5min", 90.0)])
def test_a_duration_is_in_seconds(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    "text",
    ["2", "2 h", "٣ s", "", 2],
)
def test_what_is_no_duration_is_told_how_to_write_one(text):
    with pytest.raises(ValueError, match=f"^{re.escape(f'{text!r} is not a duration; write it like ')}"):
        parse_seconds(text)


@pytest.mark.parametrize("text", ["0 s", "-1 s", f"{'9' * 400} s"])
def test_a_duration_is_above_zero_and_ends(text):
    with pytest.raises(ValueError, match="is not a duration above zero; to switch timing off, use --no-gpumem-time"):
        parse_seconds(text)


@pytest.mark.parametrize(
    ("count", "told"),
    [(0, "0 tests have them"), (1, "1 test has it"), (2, "2 tests have them"), (11, "11 tests have them")],
)
def test_words_agree_with_their_number(count, told):
    assert f"{counted(count, 'test has', 'tests have')} {word_form(count, 'it', 'them')}" == told
    assert counted(count, "test") == f"{count} test{'' if count == 1 else 's'}"
