// Counts the bytes of live tensor storages on the CPU, by slot: each thread allocates for the slot that it has chosen.
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/record_function.h>
#include <c10/core/CPUAllocator.h>

namespace {

constexpr int SLOTS = 64;
constexpr size_t HEAD = 64;  // as torch aligns storages

std::atomic<int64_t> live[SLOTS], most[SLOTS];
thread_local int slot = 0;

struct Head {
  int64_t bytes;
  int64_t slot;
  int64_t number;  // 0 for a storage that was made while nothing was logged
};

// What was made (bytes > 0) and freed (bytes < 0), in order, while a log is kept.
struct Event {
  int64_t number;
  int64_t bytes;
  int64_t slot;
  int64_t action;
};

std::mutex guard;
bool logs = false;
std::vector<Event> events;
std::vector<std::string> makers;  // of each number, from 1 on, which operators ran
thread_local int64_t action = 0;
thread_local std::vector<std::string> running;

std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
  running.emplace_back(function.name());
  return nullptr;
}

void end(const at::RecordFunction&, at::ObserverContext*) {
  if (!running.empty()) running.pop_back();
}

void log_made(Head* head) {
  std::lock_guard<std::mutex> lock(guard);
  if (!logs) return;
  std::string names;
  for (const auto& name : running) names += (names.empty() ? "" : " > ") + name;
  makers.push_back(names);
  head->number = static_cast<int64_t>(makers.size());
  events.push_back({head->number, head->bytes, head->slot, action});
}

void log_freed(const Head* head) {
  std::lock_guard<std::mutex> lock(guard);
  if (logs) events.push_back({head->number, -head->bytes, head->slot, action});
}

void give_back(void* data) {
  if (data == nullptr) return;
  char* start = static_cast<char*>(data) - HEAD;
  const Head* head = reinterpret_cast<Head*>(start);
  live[head->slot].fetch_sub(head->bytes);
  log_freed(head);
  c10::profiledCPUMemoryReporter().Delete(data);
  std::free(start);
}

struct Counting final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* start = nullptr;
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::Device(c10::DeviceType::CPU)};
    if (posix_memalign(&start, HEAD, bytes + HEAD) != 0) throw std::bad_alloc();
    *static_cast<Head*>(start) = {static_cast<int64_t>(bytes), slot, 0};
    log_made(static_cast<Head*>(start));
    const int64_t now = live[slot].fetch_add(bytes) + bytes;
    int64_t known = most[slot].load();
    while (now > known && !most[slot].compare_exchange_weak(known, now)) {
    }
    void* data = static_cast<char*>(start) + HEAD;
    // As torch's own allocator does: fxsplit's profile asks the profiler.
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

Counting counting;

}  // namespace

extern "C" {
// Every storage is counted from now on; one that was there before is given back as it would have been.
void start_counting() { c10::SetCPUAllocator(&counting, 100); }
void choose_slot(int number) { slot = number; }
int64_t count_live(int number) { return live[number].load(); }
int64_t count_most(int number) { return most[number].load(); }
void forget_most(int number) { most[number].store(live[number].load()); }
// From now on each storage that is made or freed is noted, with the operators that run.
void start_log() {
  static const auto handle = at::addGlobalCallback(at::RecordFunctionCallback(&begin, &end));
  (void)handle;
  std::lock_guard<std::mutex> lock(guard);
  logs = true;
  events.clear();
  makers.clear();
}
int64_t stop_log() {
  std::lock_guard<std::mutex> lock(guard);
  logs = false;
  return static_cast<int64_t>(events.size());
}
void choose_action(int64_t number) { action = number; }
const Event* read_events() { return events.data(); }
const char* read_maker(int64_t number) { return number > 0 ? makers[number - 1].c_str() : ""; }
// The slot of a storage that was made since counting began.
int64_t find_slot(const char* data) { return reinterpret_cast<const Head*>(data - HEAD)->slot; }
}
