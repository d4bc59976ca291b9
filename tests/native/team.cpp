// Trials of lab/team.h, by name: each ends with exit code 0, or says what was wrong. Some would hang if no other thread helped.

#include "lab/team.h"

#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace {

void expect(bool is_so, const char* what) {
  if (is_so) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

// Regions of many sizes, each piece begun once.
void every_piece_once(int64_t regions, int64_t seed) {
  std::vector<std::atomic<int>> begun(97);
  for (int64_t region = 0; region < regions; region++) {
    const int64_t count = (region * 7 + seed) % 97, threads = 1 + (region + seed) % 4;
    for (auto& times : begun) times = 0;
    lab::in_runs(count, threads, 1 + region % 3, [&](int64_t first, int64_t last, int64_t) {
      for (int64_t i = first; i < last; i++) begun[i]++;
    });
    for (int64_t i = 0; i < int64_t(begun.size()); i++) expect(begun[i] == (i < count), "each piece is begun once");
  }
}

// The first piece waits for all others, so another thread must take them.
void helped() {
  std::atomic<int> others{0};
  lab::in_runs(50, 2, 1, [&](int64_t i, int64_t, int64_t) {
    if (i > 0) others++;
    while (i == 0 && others < 49) lab::pause();
  });
}

void pieces() { every_piece_once(20000, 0); }

void sleepers() {
  for (int i = 0; i < 20; i++) {
    helped();
    std::this_thread::sleep_for(std::chrono::milliseconds(2));  // by then the others are asleep
  }
}

void two_callers() {
  std::thread other([] { every_piece_once(20000, 3); });
  every_piece_once(20000, 11);
  other.join();
}

void nested() {
  std::atomic<int> inner{0};
  lab::in_runs(8, 3, 1, [&](int64_t, int64_t, int64_t) { lab::in_runs(8, 3, 1, [&](int64_t, int64_t, int64_t) { inner++; }); });
  expect(inner == 64, "a region within a piece is done by its thread");
}

void a_held_up_thread() {
  std::atomic<bool> is_held{false}, may_go{false};
  std::thread caller([&] {
    std::atomic<int> others{0};
    lab::in_runs(1000, 2, 1, [&](int64_t i, int64_t, int64_t) {
      if (i == 0) {
        is_held = true;
        while (!may_go) lab::pause();
      } else if (++others == 999) {
        may_go = true;  // reached although one of two threads stands still
      }
    });
  });
  caller.join();
  expect(is_held, "the first piece was held up");
}

void forked() {
  helped();
  const pid_t child = fork();
  if (child == 0) {
    helped();
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  expect(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a forked child has a team of its own");
  helped();
}

// By one member all are done in order, in runs as long as is allowed.
void alone() {
  int64_t at = 0;
  lab::in_runs(10, 1, 4, [&](int64_t first, int64_t last, int64_t member) {
    expect(first == at && last == std::min<int64_t>(10, first + 4) && member == 0, "one thread works from front to back");
    at = last;
  });
  expect(at == 10, "all are done");
}

// Whatever is left of a share is taken from its end, by members that there are.
void shares() {
  for (int64_t threads : {2, 3, 5}) {
    lab::in_runs(1000, threads, 7, [&](int64_t first, int64_t last, int64_t member) {
      expect(0 <= member && member < threads && 0 < last - first && last - first <= 7, "runs are short, members known");
    });
    int64_t at = 0;
    for (int64_t member = 0; member < threads; member++) {
      expect(lab::share_begin(1000, member, threads) == at, "shares follow one another");
      at = lab::share_begin(1000, member + 1, threads);
    }
    expect(at == 1000, "shares are all");
  }
}

}  // namespace

int main(int, char** arguments) {
  const std::string name = arguments[1];
  for (const auto& [known, trial] : std::initializer_list<std::pair<const char*, void (*)()>>{
           {"pieces", pieces}, {"sleepers", sleepers}, {"two_callers", two_callers}, {"nested", nested},
           {"a_held_up_thread", a_held_up_thread}, {"forked", forked}, {"alone", alone}, {"shares", shares}}) {
    if (name == known) return trial(), 0;
  }
  return 2;
}
