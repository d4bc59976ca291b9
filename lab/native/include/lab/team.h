// Work in pieces for a team of threads, which all libraries of a process share.
//
// An OpenMP region ends when every thread of its team has come by, also one that found nothing left to do. Where another
// process has that thread's core, or the host has taken it away for a while, the region lasts until the thread is back: some
// milliseconds, a hundred times in a decode step. Here a region ends when its pieces are done, and a thread that is not running
// takes none: the others do what it would have done.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>

namespace lab {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Where a member's share of `count` pieces begins.
constexpr int64_t share_begin(int64_t count, int64_t member, int64_t members) { return count * member / members; }

class Team {
 public:
  using Piece = void (*)(const void* work, int64_t first, int64_t last, int64_t member);

  static constexpr int64_t kMostThreads = 255;

  // Has the pieces below `count` done, in runs [first, last) of up to `most`, by this thread, which is member 0, and up to
  // `threads` - 1 others; returns when all are done. Each member begins with a share of its own, from the front to the back, and
  // then takes runs from the ends of the others' shares. Pieces must not throw. While another thread is in here, this one works alone.
  void run(int64_t count, int64_t threads, int64_t most, Piece piece, const void* work) {
    threads = std::min({threads, count, kMostThreads});
    if (threads < 2 || is_taken_.test_and_set(std::memory_order_acquire)) {
      for (int64_t first = 0; first < count; first += most) piece(work, first, std::min(count, first + most), 0);
      return;
    }
    enlist(threads - 1);
    piece_ = piece, work_ = work, most_ = most;
    done_.store(0, std::memory_order_relaxed);
    for (int64_t m = 0; m < threads; m++) {
      shares_[m].left.store(Left{share_begin(count, m, threads), share_begin(count, m + 1, threads), threads}.packed(), std::memory_order_release);
    }
    num_regions_++;
    if (num_asleep_.load() > 0) {
      const std::lock_guard lock(mutex_);
      begins_.notify_all();
    }
    take_part(0, threads);
    for (int64_t spins = 0; done_.load(std::memory_order_acquire) != count; spins++) {
      spins < kSpinsBeforeYield ? pause() : std::this_thread::yield();
    }
    is_taken_.clear(std::memory_order_release);
  }

 private:
  // What is left of a share, in one word: a run is taken of just what was looked at, or not at all.
  struct Left {
    int64_t first, last, threads;

    uint64_t packed() const { return uint64_t(first) | uint64_t(last) << 28 | uint64_t(threads) << 56; }
    static Left of(uint64_t word) {
      constexpr uint64_t kMask = (uint64_t{1} << 28) - 1;
      return {int64_t(word & kMask), int64_t(word >> 28 & kMask), int64_t(word >> 56)};
    }
  };

  struct alignas(64) Share {
    std::atomic<uint64_t> left{0};
  };

  static constexpr int64_t kSpinsBeforeYield = 4096;
  static constexpr std::chrono::microseconds kAwake{200};  // a step's next region begins sooner, the next step later

  // Of the members' shares, the own one first.
  void take_part(int64_t member, int64_t members) {
    for (int64_t i = 0; i < members; i++) take_all(shares_[(member + i) % members], member, i == 0);
  }

  // What is read of the region after a run was taken is that region's: it lasts until the run is done.
  void take_all(Share& share, int64_t member, bool is_own) {
    uint64_t seen = share.left.load(std::memory_order_acquire);
    for (;;) {
      const Left left = Left::of(seen);
      if (left.first >= left.last || member >= left.threads) return;
      const int64_t size = std::min(most_.load(std::memory_order_relaxed), left.last - left.first);
      const Left rest = is_own ? Left{left.first + size, left.last, left.threads} : Left{left.first, left.last - size, left.threads};
      if (!share.left.compare_exchange_weak(seen, rest.packed(), std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      const int64_t first = is_own ? left.first : rest.last;
      piece_(work_, first, first + size, member);
      done_.fetch_add(size, std::memory_order_release);
      seen = share.left.load(std::memory_order_acquire);
    }
  }

  void serve(int64_t member) {
    for (uint64_t seen = 0;;) {
      const auto end = std::chrono::steady_clock::now() + kAwake;
      for (int64_t spins = 1; num_regions_.load() == seen; spins++) {
        pause();
        if (spins % 64 != 0 || std::chrono::steady_clock::now() < end) continue;
        std::unique_lock lock(mutex_);
        num_asleep_++;
        begins_.wait(lock, [&] { return num_regions_.load() != seen; });
        num_asleep_--;
      }
      seen = num_regions_.load();
      take_part(member, num_members_.load(std::memory_order_relaxed));
    }
  }

  void enlist(int64_t others) {
    for (int64_t member = num_members_; member <= others; member++) {
      num_members_ = member + 1;
      std::thread([this, member] { serve(member); }).detach();
    }
  }

  Piece piece_ = nullptr;
  const void* work_ = nullptr;
  std::atomic<int64_t> most_{1}, num_members_{1};
  std::atomic_flag is_taken_ = ATOMIC_FLAG_INIT;
  std::mutex mutex_;
  std::condition_variable begins_;
  std::atomic<int> num_asleep_{0};
  alignas(64) std::atomic<uint64_t> num_regions_{0};
  alignas(64) std::atomic<int64_t> done_{0};
  Share shares_[kMostThreads];
};

// The process's team. It is never destroyed, since its threads do not end; a forked child, which has none of them, gets another.
// Default visibility makes the variable one for all libraries that are compiled by GCC; those of Clang have a team each.
struct __attribute__((visibility("default"))) TheTeam {
  static inline Team* team = nullptr;
  static inline std::once_flag made;
};

inline Team& team() {
  std::call_once(TheTeam::made, [] {
    TheTeam::team = new Team;
    pthread_atfork(nullptr, nullptr, [] { TheTeam::team = new Team; });
  });
  return *TheTeam::team;
}

// piece(first, last, member) for runs that together are all below `count`, by up to `threads` members: see Team::run.
template <typename F>
void in_runs(int64_t count, int64_t threads, int64_t most, const F& piece) {
  const auto call = [](const void* work, int64_t first, int64_t last, int64_t member) {
    (*static_cast<const F*>(work))(first, last, member);
  };
  team().run(count, threads, std::max<int64_t>(most, 1), call, &piece);
}

}  // namespace lab
