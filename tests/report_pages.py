"""Plan directories that the tests of the report share, and a reader of the pages made of them."""

import itertools
from html.parser import HTMLParser
from pathlib import Path

import msgspec

from tccl_py.model.measurement import JOURNAL_FILE, JournalHeader
from tccl_py.model.rings import bounce, direct_write
from tccl_py.model.transfer import transfer_set
from tccl_py.plan.directory import write_plan
from tccl_py.plan.load import load_plan
from tccl_py.simulator.descriptions import load_bundled
from tccl_py.simulator.source import Simulator
from tccl_py.sources.bench import Bench
from tccl_py.sources.journal import JournalFile
from tests.planned import with_parts

PLANS = Path(__file__).parent.parent / "plans"
VOID = {"meta", "link", "br", "input"}
EVIL = '<script>alert("x")</script>\x1b[31m\u202e&amp;'


def plan_directory(place, name, *, sets=(), **changes):
    """A reference plan's directory; `sets` are simulated into its journal."""
    plan = load_plan(PLANS / f"{name}.json")
    if changes:
        plan = with_parts(plan, **changes)
    place.mkdir(parents=True, exist_ok=True)
    write_plan(plan, place)
    header = JournalHeader(machine=plan.machine.name, identity="a test", simulated=True)
    source = Simulator(load_bundled(name))
    with Bench(source, journal=JournalFile(place / JOURNAL_FILE, header)) as journal:
        journal.measure(list(sets))
    return place


def all_singles_and_pairs(gpus, numa_nodes, *, pairs):
    """Every write alone, every bounce of neighbours, and some writes two at a time."""
    writes = [direct_write(i, j, blocks=2) for i, j in itertools.permutations(gpus, 2)]
    yield from (transfer_set([one]) for one in writes)
    for node in numa_nodes:
        yield from (transfer_set([bounce(i, (i + 1) % len(gpus), node, blocks=2)]) for i in gpus)
    several = zip(writes, writes[7:], strict=False)
    yield from (transfer_set(two) for two in itertools.islice(several, pairs))


def renamed(machine, name):
    """The machine with a bad name for itself and for its first GPU."""
    first, *others = machine.gpus
    gpus = (msgspec.structs.replace(first, name=name), *others)
    return msgspec.structs.replace(machine, name=name, gpus=gpus)


class Page(HTMLParser):
    """What a test asks of a page: elements with attributes, headings, text, and nesting."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.open, self.text, self.headings = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == [], "elements that are not closed"

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), len(self.elements)))
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("h1", "h2", "h3", "h4"):
            self.headings.append(int(tag[1]))

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), len(self.elements)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open and "title" not in self.open and "desc" not in self.open:
            self.text.append(data)

    @property
    def words(self):
        """The visible text, in one line."""
        return " ".join("".join(self.text).split())

    def all(self, tag):
        """Attributes of every such element."""
        return [attributes for name, attributes, _ in self.elements if name == tag]

    def assert_accessible(self):
        """Every picture has words, ids are unique, headings in order, nothing acts or loads."""
        ids = [a["id"] for _, a, _ in self.elements if "id" in a]
        assert len(ids) == len(set(ids))
        for attributes in (*self.all("svg"), *self.all("img")):
            assert attributes.get("role") == "img" or "alt" in attributes
            named = attributes.get("aria-labelledby", "").split()
            assert set(named) <= set(ids)
            assert named or attributes.get("aria-label") or attributes.get("alt")
        assert self.headings[0] == 1
        assert self.headings.count(1) == 1
        assert all(b <= a + 1 for a, b in itertools.pairwise(self.headings))
        assert self.all("html")[0]["lang"] == "en"
        assert not self.all("script")
        loads = [v for _, a, _ in self.elements for k, v in a.items() if k in ("src", "href")]
        assert [target for target in loads if not target.startswith("#")] == ["data:,"]
        assert {target[1:] for target in loads if target.startswith("#")} <= set(ids)
        assert not [k for _, a, _ in self.elements for k in a if k.startswith("on")]
