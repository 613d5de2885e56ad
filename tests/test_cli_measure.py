"""`tccl measure`: figures, their order, their mark, and the journal."""

from tccl_py.cli.measure import _measured_row
from tccl_py.model.measurement import Measurement
from tccl_py.model.transfer import parse_set


def test_flows_given_twice_keep_a_rate_each():
    text = "G2->G2->G3 G0->G0->G1 G2->G2->G3{blocks=4} G0->G0->G1"
    samples = {"G0->G0->G1": [1.0, 2.0], "G2->G2->G3": [3.0], "G2->G2->G3{blocks=4}": [4.0]}
    flows = str(parse_set(text)).split()
    rows = tuple((samples[flow].pop(0),) for flow in flows)
    measurement = Measurement(
        transfers=parse_set(" ".join(flows)), samples_gbps=rows, simulated=True
    )
    row = _measured_row(text.split(), measurement, dry_run=False)
    assert row.gbps == (3.0, 1.0, 4.0, 2.0)
