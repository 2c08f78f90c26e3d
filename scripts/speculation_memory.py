"""KV tokens that are left beside 8 speculating requests, with a record and with a state page for every candidate row.

    python scripts/speculation_memory.py --memory 64 --drafts 3 7

Prints a Markdown table. Weights count as parameters times their bits, without scales and without what a step needs
besides. The state is that of `gdnjax.sizes`: float32, with rings, records and KV in bfloat16, the draft head's cache
included; a request has one state page (`in_place`) and its record, or a page for each of its 1 + k rows.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gdnjax.config import Config, from_preset
from gdnjax.config.huggingface import interval_layers
from gdnjax.sizes import layouts, sizes

REQUESTS = 8


def models() -> dict[str, tuple[Config, float]]:
    """By name a config whose state is the model's, and the model's parameters."""
    large = from_preset("27b").replace(draft_kv=True)
    # Mixture of experts is refused, but a state does not depend on it: the published sizes that it does depend on, and
    # the parameters that the published sizes add up to.
    experts = large.replace(
        hidden_size=2048, num_hidden_layers=40, layer_types=interval_layers(40, 4), num_attention_heads=16,
        num_key_value_heads=2, linear_num_value_heads=32,
    )  # fmt: skip
    return {"27B": (large, sizes(large).parameters), "35B-A3B": (experts, 35.5e9)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory", type=float, default=64, metavar="GIB", help="(64)")
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 7], metavar="K", help="(3 7)")
    args = parser.parse_args()
    print("| model | bits of a weight | drafts | KV tokens, slots | KV tokens, record | more |")
    print("|---|---|---|---|---|---|")
    for name, (config, parameters) in models().items():
        costs = {drafts: layouts(config, drafts) for drafts in args.drafts}
        for bits in (16, 8, 4):
            for drafts, ways in costs.items():
                tokens = {}
                for kind in ("slots", "record"):
                    cost = sizes(ways["in_place", kind])
                    free = args.memory * 2**30 - parameters * bits / 8 - REQUESTS * cost.bytes_per_request["in_place"]
                    tokens[kind] = max(0, int(free / cost.bytes_per_kv_token))
                slots, record = tokens["slots"], tokens["record"]
                more = f"+{record / slots - 1:.0%}" if slots else "all of them"
                left = f"{slots:,} | {record:,} | {more}" if record else "- | - | the weights do not fit"
                print(f"| {name} | {bits} | {drafts} | {left} |")


if __name__ == "__main__":
    main()
