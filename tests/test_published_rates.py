"""The table of published rates: as committed, and each rate with the place it came from."""

from scripts.published_rates import PAGE, published, table


def test_the_page_has_the_table_that_the_script_writes():
    assert PAGE.read_text().endswith(table())


def test_each_published_rate_names_its_source_and_a_size():
    assert all(row.source and row.size and row.gbps > 0 for row in published())
