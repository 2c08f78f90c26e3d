"""KV tokens that are left beside 8 speculating requests, with a record and with a state page for every candidate row.

    python scripts/speculation_memory.py --memory 64 --drafts 3 7

Prints a Markdown table. From published sizes alone: weights count as parameters times their bits, without scales and
without what a step needs besides; states are float32 and rings, records and KV bfloat16; a request has one state page
(`in_place`) and its record, or a page for each of its 1 + k rows. The KV cache has the draft head's layer too.
"""

from __future__ import annotations

import argparse
import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
    """parameters: of everything that is loaded. gdn_layers, attention_layers: how many. The rest as in `Config`."""

    name: str
    parameters: float
    gdn_layers: int
    attention_layers: int
    value_heads: int
    kv_heads: int
    key_heads: int = 16
    dim: int = 128
    head_dim: int = 256

    def page(self) -> int:
        """Bytes of one state page of one layer."""
        return 4 * self.value_heads * self.dim**2

    def row(self) -> int:
        """Bytes of one row in a layer's record: k, v, a and b."""
        return 2 * ((self.key_heads + self.value_heads) * self.dim + 2 * self.value_heads)

    def request(self, drafts: int, pages: int, record: bool) -> int:
        """Bytes of a request without its KV: pages, the ring of 4 + `drafts` columns, and the record's two halves."""
        ring = 2 * (4 + drafts) * (2 * self.key_heads + self.value_heads) * self.dim
        return self.gdn_layers * (pages * self.page() + ring + record * 2 * (1 + drafts) * self.row())

    def kv_token(self) -> int:
        """Bytes of one token in the cache, the draft head's included."""
        return 2 * 2 * (self.attention_layers + 1) * self.kv_heads * self.head_dim


MODELS = (
    Model("27B", 27.32e9, 48, 16, value_heads=48, kv_heads=4),
    Model("35B-A3B", 35.5e9, 30, 10, value_heads=32, kv_heads=2),
)
REQUESTS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=64, metavar="GIB", help="(64)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7], metavar="K", help="(3 7)")
    args = parser.parse_args()
    print("| model | bits of a weight | drafts | KV tokens, slots | KV tokens, record | more |")
    print("|---|---|---|---|---|---|")
    for model in MODELS:
        for bits in (16, 8, 4):
            for drafts in args.drafts:
                free = args.memory * 2**30 - model.parameters * bits / 8
                slots, record = (
                    max(0, int((free - REQUESTS * model.request(drafts, pages, kept)) / model.kv_token()))
                    for pages, kept in ((1 + drafts, False), (1, True))
                )
                more = f"+{record / slots - 1:.0%}" if slots else "all of them"
                left = f"{slots:,} | {record:,} | {more}" if record else "- | - | the weights do not fit"
                print(f"| {model.name} | {bits} | {drafts} | {left} |")


if __name__ == "__main__":
    main()
