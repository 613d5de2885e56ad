"""Published all-reduces: the page as committed, and errors of machines the fit has seen or not."""

import re

from scripts.published_rates import PAGE, sections
from scripts.simulator_fit import mean_bandwidth, published_rates

PAGE_TEXT = PAGE.read_text()


def test_the_page_has_the_tables_that_the_script_writes():
    assert PAGE_TEXT.endswith(sections())


def test_each_published_row_names_its_source():
    content = published_rates()
    assert all(row.source for row in (*content.rates, *content.apart, *content.latencies))


def test_published_rates_are_predicted_within_a_quarter_also_where_the_fit_left_a_machine_out():
    errors = [
        int(error)
        for line in PAGE_TEXT.splitlines()
        if line.startswith("|")
        for error in re.findall(r"([+-]\d+)%", line)
    ]
    assert len(errors) >= 2 * 8 + 4
    assert max(map(abs, errors)) <= 21
    assert sum(abs(error) <= 15 for error in errors) >= len(errors) - 2


def test_a_message_is_slower_the_smaller_it_is_and_a_mean_lies_between():
    large, small = (mean_bandwidth(40.0, 8, [size], 2.0) for size in (1 << 40, 1 << 22))
    assert small < mean_bandwidth(40.0, 8, [1 << 22, 1 << 40], 2.0) < large < 40.0
    # 8 steps' worth of 2 us each beside 4 MiB at 40 GB/s.
    assert abs(small - (1 << 22) / ((1 << 22) / 40.0 + 16_000)) < 1e-9
