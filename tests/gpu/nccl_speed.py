"""All-reduce between GPUs by size, way and place: `python -m tests.gpu.nccl_speed FILE [RANKS...]`.

With 2 ranks in three places, with more in one container alone. FILE gets a JSON object a line, with
the transport that NCCL chose there. Bandwidth is that of the bus: what each GPU must send at least,
2 (N - 1) / N times the size, over the time.
"""

import json
import sys

from minisgl.bench import ending_on_signals
from tests.gpu.rank_processes import PLAIN, PRIVATE, SHARED, run_ranks, visible_gpus

WAYS = ("pynccl", "symmetric", "torch")


def main() -> None:
    file = sys.argv[1]
    sizes = [int(text) for text in sys.argv[2:]] or [2, 4, 8]
    with ending_on_signals(), open(file, "w") as out:
        for size in [size for size in sizes if size <= len(visible_gpus())]:
            for place in (PLAIN, SHARED, PRIVATE) if size == 2 else (PLAIN,):
                row = {"ranks": size, "place": place}
                try:
                    results = run_ranks(size, ("--case=speed",), place=place, symmetric=True)
                    # All ranks are there in each all-reduce; the first one's times count.
                    row |= next(
                        (r for r in results if r is not None), {"error": "no rank answered"}
                    )
                except Exception as error:  # the other places are still to be measured
                    row["error"] = str(error)[:300]
                out.write(json.dumps(row) + "\n")
                out.flush()
                show(row)


def show(row: dict[str, object]) -> None:
    """A line for each way and size."""
    size = int(str(row["ranks"]))
    print(f"{size} ranks, {row['place']}: {row.get('transport', row.get('error'))}", flush=True)
    for way in WAYS:
        times = row.get(way)
        for kib, (us, rate, eager) in (times if isinstance(times, dict) else {}).items():
            bus = rate * 2 * (size - 1) / size
            print(
                f"  {way:10} {kib:>6} KiB {us:9.1f} us {bus:7.1f} GB/s of the bus, eager call "
                f"{eager:6.1f} us",
                flush=True,
            )


if __name__ == "__main__":
    main()
