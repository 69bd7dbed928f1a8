// Threads that compute a step together: they start at once, meet at barriers, and sleep between.
//
// The caller is thread 0. A wait spins for some tens of microseconds, as long as the others take to
// come to a barrier, and then sleeps, so that processes that share a machine get on. It never offers
// its core by sched_yield: beside a busy process Linux takes that for a whole time slice or more, at
// each of some hundred barriers of a step. Threads are pinned to no core: two processes would choose
// the same ones, and a process that the caller starts would inherit one core only.
#pragma once

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <type_traits>
#include <vector>

namespace minisgl {

inline void pause_core() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A counter whose change can be waited for.
class Gate {
 public:
  std::uint32_t value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1);  // sequentially consistent, as `sleepers_`: one of both sees the other
    if (sleepers_.load() == 0) return;
    pthread_mutex_lock(&mutex_);
    pthread_cond_broadcast(&changed_);
    pthread_mutex_unlock(&mutex_);
  }

  // Until the value is not `old`.
  void wait(std::uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
      if (value() != old) return;
      pause_core();
    }
    sleepers_.fetch_add(1);
    pthread_mutex_lock(&mutex_);
    while (value_.load() == old) pthread_cond_wait(&changed_, &mutex_);
    pthread_mutex_unlock(&mutex_);
    sleepers_.fetch_sub(1);
  }

 private:
  static constexpr int kSpins = 2000;  // of 40 to 140 cycles

  alignas(64) std::atomic<std::uint32_t> value_{0};
  std::atomic<std::uint32_t> sleepers_{0};
  alignas(64) pthread_mutex_t mutex_ = PTHREAD_MUTEX_INITIALIZER;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
};

class Team {
 public:
  explicit Team(int threads) : wanted_(threads < 1 ? 1 : threads), threads_(wanted_) {}
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  ~Team() {
    if (!state_ || pid_ != getpid()) return;  // after a fork, the threads are the parent's
    state_->ends.store(true);
    state_->start.advance();
    for (const pthread_t worker : workers_) pthread_join(worker, nullptr);
    delete state_;
  }

  // How many compute: fewer than asked for, once `run` was called, where no more can be started.
  int threads() const { return threads_; }

  // Calls fn(thread, threads) on every thread, and returns when all have. One call at a time.
  template <class F>
  void run(F&& fn) {
    if (wanted_ > 1 && (!state_ || pid_ != getpid())) start();
    if (threads_ == 1) {
      fn(0, 1);
      return;
    }
    using Fn = std::remove_reference_t<F>;
    state_->call = [](void* f, int t, int n) { (*static_cast<Fn*>(f))(t, n); };
    state_->argument = const_cast<void*>(static_cast<const void*>(&fn));
    state_->start.advance();
    fn(0, threads_);
    barrier();
  }

  // Inside `run`: returns when all threads are here, and each sees what the others wrote.
  void barrier() {
    if (threads_ == 1) return;
    State& s = *state_;
    const std::uint32_t turn = s.turn.value();
    if (s.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      s.arrived.store(0, std::memory_order_relaxed);
      s.turn.advance();
    } else {
      s.turn.wait(turn);
    }
  }

 private:
  struct State {
    Gate start, turn;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) void (*call)(void*, int, int) = nullptr;
    void* argument = nullptr;
    std::atomic<bool> ends{false};
  };

  struct Birth {
    Team* team;
    State* state;
    int thread;
  };

  // A child of fork has none of its parent's threads, and state that they may have left half
  // changed: it begins anew.
  void start() {
    workers_.clear();
    pid_ = getpid();
    state_ = new State;
    sigset_t all, before;  // signals are for the threads of the caller
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int thread = 1; thread < wanted_; ++thread) {
      Birth* birth = new Birth{this, state_, thread};
      pthread_t worker;
      if (pthread_create(&worker, nullptr, &Team::work, birth) != 0) {
        delete birth;
        break;
      }
      workers_.push_back(worker);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    threads_ = 1 + static_cast<int>(workers_.size());
  }

  static void* work(void* argument) {
    const Birth birth = *static_cast<Birth*>(argument);
    delete static_cast<Birth*>(argument);
    State& s = *birth.state;
    for (std::uint32_t seen = 0;; ++seen) {
      s.start.wait(seen);
      if (s.ends.load()) return nullptr;
      s.call(s.argument, birth.thread, birth.team->threads_);
      birth.team->barrier();
    }
  }

  const int wanted_;
  int threads_;
  pid_t pid_ = 0;
  State* state_ = nullptr;
  std::vector<pthread_t> workers_;
};

}  // namespace minisgl
