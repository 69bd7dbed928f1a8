// The pages of each request, from its slots in the page table.
#include "common.cuh"

using namespace minisgl;

namespace {

constexpr int kThreads = 128;

// A block a request. With `starts` the pages of all requests stand one after the other, request
// i's from starts[i] on; without, request i has row i of `pages`, `width` apart.
__global__ void block_table(int* pages, const int* page_table, const int* rows, const int* lens,
                            const int* starts, int page_size, int64_t columns, int64_t width) {
  wait_for_previous();
  launch_next();
  const int i = blockIdx.x;
  const int count = (lens[i] + page_size - 1) / page_size;
  const int* from = page_table + rows[i] * columns;
  int* to = pages + (starts ? starts[i] : i * width);
  for (int page = threadIdx.x; page < count; page += kThreads) {
    to[page] = from[int64_t{page} * page_size] / page_size;
  }
}

}  // namespace

// (pages [batch, width] or [all], page_table [rows, columns], rows [batch], lens [batch],
//  starts [batch + 1] or None, page_size); all int32
EXPORT(block_table) {
  const int* starts = args.data<const int>(4);
  return launch(block_table, args.size(2, 0), kThreads, 0, args.stream(), args.data<int>(0),
                args.data<const int>(1), args.data<const int>(2), args.data<const int>(3), starts,
                args.integer(5), args.stride(1, 0), starts ? 0 : args.stride(0, 0));
}
