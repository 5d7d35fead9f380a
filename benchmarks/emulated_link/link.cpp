// A process group of one process among imagined ones, over a link of set latency and bandwidth.
//
//   compute   launch |------ ops ------| wait |-- ops that read the result
//   link              |- time on the link -copy|                               one after another
//
// Every other rank is imagined to hold what this one does: a gather repeats its input, a sum
// multiplies it. What a rank of a ring sends decides how long that takes. Results are written when
// the time is over, never sooner, so that a read without a wait finds what was there before.
//
// On a GPU the link is a stream that spins, and copies; on a CPU a thread that sleeps, and copies.
// No tensor is given to `record_stream`: a work holds its tensors until it has been waited for, or,
// on a CPU, has ended.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/ScalarOps.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/utils/pybind.h>

// Streams and events of any device: only the library of CUDA is needed, and none of its headers.
#ifdef EMULATED_LINK_CUDA
#include <ATen/cuda/Sleep.h>
#endif

namespace {

using at::Tensor;
using c10d::OpType;
using Clock = std::chrono::steady_clock;
using Tensors = std::vector<Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// Of all groups of this process.
std::atomic<double> latency_us{0.0};
std::atomic<double> bytes_per_us{1e6};
std::atomic<double> copy_bytes_per_us{1e9};  // the copy is part of the time on the link
std::atomic<double> cycles_per_us{0.0};  // of a GPU
std::atomic<bool> has_priority{true};  // of a GPU's stream, over what computes

struct Copy {  // to = factor * from
  Tensor to;
  Tensor from;
  int64_t factor;
};

void run(const std::vector<Copy>& copies) {
  at::AutoDispatchBelowADInplaceOrView guard;
  for (const auto& [to, from, factor] : copies) {
    if (factor != 1) {
      Tensor out = to;
      at::mul_out(out, from, at::native::wrapped_scalar_tensor(factor));
    } else if (!to.is_set_to(from)) {
      to.copy_(from);
    }
  }
}

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// On the current stream.
void spin(double us) {
#ifdef EMULATED_LINK_CUDA
  at::cuda::sleep(static_cast<int64_t>(us * cycles_per_us));
#else
  TORCH_CHECK(false, "this emulated link was built without CUDA; ", us, " us asked for");
#endif
}

class LinkWork final : public c10d::Work {
 public:
  // num_bytes: what this rank sends.
  LinkWork(OpType type, const char* title, std::vector<Copy> copies, double num_bytes)
      : Work(-1, type, title),
        copies_(std::move(copies)),
        launched_(Clock::now()),
        total_us_(latency_us + num_bytes / bytes_per_us) {
    double copied = 0;
    for (const auto& copy : copies_) copied += copy.to.nbytes();
    copy_us_ = copied / copy_bytes_per_us;
  }

  bool isCompleted() override {
    return end_ ? end_->query() : Work::isCompleted();
  }

  // On a CPU until it has ended; on a GPU the current stream waits, not the host.
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    std::vector<Copy> dropped;  // outside of the lock: Python may want its own for that
    std::unique_lock<std::mutex> lock(mutex_);
    cv_.wait(lock, [this] { return completed_; });
    if (exception_) std::rethrow_exception(exception_);
    if (end_) end_->block(current_stream(end_->device()));
    dropped.swap(copies_);
    return true;
  }

  void synchronize() override { wait(kNoTimeout); }

  // Whether it holds nothing any more: it has been waited for, or, on a CPU, has ended. A GPU is not
  // asked, which is forbidden while a CUDA graph is captured.
  bool release() {
    const bool has_ended = !end_ && isCompleted();
    std::vector<Copy> dropped;
    std::lock_guard<std::mutex> lock(mutex_);
    if (has_ended) dropped.swap(copies_);
    return copies_.empty();
  }

  // In the link's thread. Returns when the link is free: what keeps this thread from running, or
  // from copying as fast as usual, delays this result, and not those behind it.
  Clock::time_point travel(Clock::time_point free) {
    const auto end = std::max(launched_, free) + after(total_us_);
    std::this_thread::sleep_until(end - after(copy_us_));
    try {
      run(copies_);
      std::this_thread::sleep_until(end);
      finish();
    } catch (...) {
      finish(std::current_exception());
    }
    return end;
  }

  // On the link's stream, behind what the current one has been given.
  void travel(c10::Stream link) {
    c10::Event begin(link.device_type());
    begin.record(current_stream(link.device()));
    begin.block(link);
    c10::StreamGuard guard(link);
    spin(std::max(0.0, total_us_ - copy_us_));
    run(copies_);
    end_.emplace(link.device_type());
    end_->record(link);
    finish();  // for the host: there is an event to wait for
  }

 private:
  static Clock::duration after(double us) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double, std::micro>(us));
  }

  std::vector<Copy> copies_;
  Clock::time_point launched_;
  double total_us_;
  double copy_us_ = 0;
  std::optional<c10::Event> end_;
};

class Link final : public c10d::Backend {
 public:
  Link(int rank, int size, std::chrono::milliseconds timeout)
      : Backend(rank, size), options_(c10::make_intrusive<Options>("emulated_link", timeout)) {}

  ~Link() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      closed_ = true;
    }
    changed_.notify_all();
    if (thread_.joinable()) thread_.join();
    for (auto& work : held_) work->release();
  }

  const std::string getBackendName() const override { return "emulated_link"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions&) override {
    return launch(OpType::BROADCAST, "link:broadcast", {}, share(tensors), device_of(tensors));
  }

  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    std::vector<Copy> copies;
    for (auto& tensor : tensors) copies.push_back({tensor, tensor, factor(options.reduceOp)});
    const double sent = 2 * share(tensors);
    return launch(
        OpType::ALLREDUCE, "link:all_reduce", std::move(copies), sent, device_of(tensors));
  }

  WorkPtr allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return allreduce(tensors, options);
  }

  WorkPtr allgather(
      std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    std::vector<Copy> copies;
    double sent = 0;
    for (size_t i = 0; i < inputs.size(); ++i) {
      for (auto& output : outputs.at(i)) copies.push_back({output, inputs[i], 1});
      sent += share(outputs[i]);
    }
    return launch(OpType::ALLGATHER, "link:all_gather", std::move(copies), sent, device_of(inputs));
  }

  WorkPtr _allgather_base(
      Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return allgather_into_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr allgather_into_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions&) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "a gather has as many outputs as inputs");
    std::vector<Copy> copies;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_whole(outputs[i], inputs[i]);
      auto slots = outputs[i].view({getSize(), inputs[i].numel()});
      copies.push_back({slots, inputs[i].reshape({1, -1}).expand_as(slots), 1});
    }
    return launch(
        OpType::_ALLGATHER_BASE, "link:all_gather", std::move(copies), share(outputs),
        device_of(inputs));
  }

  WorkPtr reduce_scatter(
      Tensors& outputs, std::vector<Tensors>& inputs,
      const c10d::ReduceScatterOptions& options) override {
    std::vector<Copy> copies;
    double sent = 0;
    for (size_t i = 0; i < outputs.size(); ++i) {
      copies.push_back({outputs[i], inputs.at(i).at(getRank()), factor(options.reduceOp)});
      sent += share(inputs[i]);
    }
    return launch(
        OpType::REDUCE_SCATTER, "link:reduce_scatter", std::move(copies), sent, device_of(outputs));
  }

  WorkPtr _reduce_scatter_base(
      Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    Tensors outputs{output}, inputs{input};
    return reduce_scatter_tensor_coalesced(outputs, inputs, options);
  }

  WorkPtr reduce_scatter_tensor_coalesced(
      Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    TORCH_CHECK(outputs.size() == inputs.size(), "a reduce has as many outputs as inputs");
    std::vector<Copy> copies;
    for (size_t i = 0; i < inputs.size(); ++i) {
      check_whole(inputs[i], outputs[i]);
      auto part = inputs[i].view({getSize(), outputs[i].numel()})[getRank()];
      copies.push_back({outputs[i], part.view(outputs[i].sizes()), factor(options.reduceOp)});
    }
    return launch(
        OpType::_REDUCE_SCATTER_BASE, "link:reduce_scatter", std::move(copies), share(inputs),
        device_of(inputs));
  }

  // From this rank, to itself; an imagined rank sends what there is.
  WorkPtr scatter(
      Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions&) override {
    std::vector<Copy> copies;
    if (!inputs.empty()) copies.push_back({outputs.at(0), inputs[0].at(getRank()), 1});
    const double sent = share(outputs) * getSize();
    return launch(
        OpType::SCATTER, "link:scatter", std::move(copies), sent, device_of(outputs));
  }

  WorkPtr alltoall_base(
      Tensor& output, Tensor& input, std::vector<int64_t>&, std::vector<int64_t>&,
      const c10d::AllToAllOptions&) override {
    return launch(
        OpType::ALLTOALL_BASE, "link:all_to_all", {{output, input.view(output.sizes()), 1}},
        share({input}), input.device());
  }

  WorkPtr barrier(const c10d::BarrierOptions&) override {
    return launch(OpType::BARRIER, "link:barrier", {}, 0, at::kCPU);
  }

 private:
  // Of a whole tensor, or a list of its parts: the bytes that a rank of a ring sends.
  double share(const Tensors& whole) const {
    double total = 0;
    for (const auto& tensor : whole) total += tensor.nbytes();
    return total * (getSize() - 1) / getSize();
  }

  static at::Device device_of(const Tensors& tensors) {
    TORCH_CHECK(!tensors.empty(), "a collective of no tensors");
    return tensors[0].device();
  }

  int64_t factor(const c10d::ReduceOp& op) const {
    switch (op) {
      case c10d::ReduceOp::SUM:
        return getSize();
      case c10d::ReduceOp::AVG:
      case c10d::ReduceOp::MIN:
      case c10d::ReduceOp::MAX:
        return 1;
      default:
        TORCH_CHECK(false, "the emulated link reduces by SUM, AVG, MIN or MAX");
    }
  }

  void check_whole(const Tensor& whole, const Tensor& part) const {
    TORCH_CHECK(
        whole.numel() == getSize() * part.numel() && whole.scalar_type() == part.scalar_type(),
        "expected a whole of ", getSize(), " times ", part.sizes(), " ", part.scalar_type(),
        ", not ", whole.sizes(), " ", whole.scalar_type());
  }

  WorkPtr launch(
      OpType type, const char* title, std::vector<Copy> copies, double sent, at::Device device) {
    auto work = c10::make_intrusive<LinkWork>(type, title, std::move(copies), sent);
    std::lock_guard<std::mutex> lock(mutex_);
    while (!held_.empty() && held_.front()->release()) held_.pop_front();
    if (device.is_cuda()) {
      if (!stream_ || stream_->device() != device) {
        stream_ = c10::impl::VirtualGuardImpl(device.type())
                      .getStreamFromGlobalPool(device, has_priority);
      }
      work->travel(*stream_);
    } else {
      queue_.push_back(work);
      if (!thread_.joinable()) thread_ = std::thread([this] { serve(); });
      changed_.notify_all();
    }
    held_.push_back(work);
    return work;
  }

  // The link of tensors on a CPU.
  void serve() {
    Clock::time_point free;
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      changed_.wait(lock, [this] { return closed_ || !queue_.empty(); });
      if (queue_.empty()) return;
      auto work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      free = work->travel(free);
      work.reset();
      lock.lock();
    }
  }

  c10::intrusive_ptr<Options> options_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<c10::intrusive_ptr<LinkWork>> queue_;  // to travel
  std::deque<c10::intrusive_ptr<LinkWork>> held_;  // until they hold nothing
  std::thread thread_;
  bool closed_ = false;
  std::optional<c10::Stream> stream_;  // the link of tensors on a GPU
};

c10::intrusive_ptr<c10d::Backend> make_link(
    const c10::intrusive_ptr<c10d::Store>& /*store*/, int rank, int size,
    const std::chrono::duration<float>& timeout) {
  return c10::make_intrusive<Link>(
      rank, size, std::chrono::duration_cast<std::chrono::milliseconds>(timeout));
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("make_link", &make_link);
  module.def("set_link", [](double latency, double bandwidth, double copies, double cycles) {
    latency_us = latency;
    bytes_per_us = bandwidth;
    copy_bytes_per_us = copies;
    cycles_per_us = cycles;
  });
  module.def("set_priority", [](bool priority) { has_priority = priority; });
}
