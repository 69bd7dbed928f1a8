#pragma once
#include "cuda_runtime.h"

namespace cooperative_groups {

struct cluster_group {
  int block_rank() const { return emulator::block().rank; }
  void barrier_arrive() const { emulator::cluster_arrive(); }
  void barrier_wait() const { emulator::cluster_wait(); }
  void sync() const {
    barrier_arrive();
    barrier_wait();
  }
  template <class T>
  T* map_shared_rank(T* mine, int rank) const {
    const auto distance = reinterpret_cast<char*>(mine) - &emulator::anchor;
    return reinterpret_cast<T*>(emulator::block().cluster->anchors[rank] + distance);
  }
};

inline cluster_group this_cluster() { return {}; }

}  // namespace cooperative_groups
