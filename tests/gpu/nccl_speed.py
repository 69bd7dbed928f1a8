"""All-reduce between two GPUs by size, way and place: `python -m tests.gpu.nccl_speed [PLACE...]`.

Each place is one JSON line, with the transport that NCCL chose there.
"""

import json
import sys

from tests.gpu.pairs import PLAIN, PRIVATE, SHARED, run_pair


def main() -> None:
    places = {"plain": PLAIN, "shared": SHARED, "private": PRIVATE}
    chosen = sys.argv[1:] or list(places)
    for name in chosen:
        try:
            first, second = run_pair(("--case=speed",), place=places[name], symmetric=True)
        except Exception as error:  # the other places are still to be measured
            print(json.dumps({"place": places[name], "error": str(error)[:300]}), flush=True)
            continue
        print(json.dumps({"place": places[name], **(first or second or {})}), flush=True)
        for way in ("pynccl", "symmetric", "torch"):
            for kib, (us, rate, eager) in (first or {}).get(way, {}).items():
                print(f"  {places[name]:18} {way:10} {kib:>6} KiB {us:9.1f} us {rate:7.1f} GB/s "
                      f"eager call {eager:6.1f} us", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
