#include "client.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>

namespace ls::kv {
namespace {

// The sender fills the socket more slowly than it is emptied; a wake-up for every few kilobytes would cost more than the copy. Little enough
// that a slow link does not look silent: 64 KiB within the idle time.
constexpr size_t kLowWater = 64 << 10;
constexpr size_t kBudget = 1 << 20;  // bytes moved for one pull before the next has its turn, and a cancel at most waits for

uint32_t micros_since(Clock::time_point begin) {
  return static_cast<uint32_t>(std::clamp<int64_t>(std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - begin).count(), 0, INT32_MAX));
}

}  // namespace

Client::~Client() {
  stop_ = true;
  poller_.ring();
  if (thread_.joinable()) thread_.join();
}

Status Client::start() {
  if (Status status = Poller::create(poller_); !status.ok()) return status;
  thread_ = std::thread([this] { run(); });
  pthread_setname_np(thread_.native_handle(), "ls-kv-pull");
  return Status::good();
}

void Client::pull(std::shared_ptr<Pull> pull) {
  ++active_;
  {
    const std::lock_guard lock(mutex_);
    new_pulls_.push_back(std::move(pull));
  }
  poller_.ring();
}

void Client::cancel(Pull &pull) {
  pull.cancelled_ = true;
  {
    const std::lock_guard landed(pull.memory_);
    if (pull.request_.flush) pull.request_.flush();
  }
  poller_.ring();
}

void Client::drop(const Address &from, uint64_t id) {
  {
    const std::lock_guard lock(mutex_);
    // More than this are not told; the sender's own time limit ends their copies.
    if (new_drops_.size() == kMaxDrops) new_drops_.pop_front();
    new_drops_.push_back({from, id});
  }
  poller_.ring();
}

void Client::run() {
  while (!stop_) {
    take_new();
    for (const epoll_event &event : poller_.wait(sweep())) {
      const auto it = jobs_.find(event.data.u64);
      if (it != jobs_.end() && !serve(*it->second, it->first, event.events)) remove(it->first);
    }
  }
}

void Client::take_new() {
  std::deque<std::shared_ptr<Pull>> pulls;
  std::deque<Drop> drops;
  {
    const std::lock_guard lock(mutex_);
    pulls.swap(new_pulls_);
    for (; !new_drops_.empty() && drop_jobs_ + drops.size() < kMaxDropJobs; new_drops_.pop_front()) drops.push_back(new_drops_.front());
  }
  for (std::shared_ptr<Pull> &pull : pulls) {
    auto job = std::make_unique<Job>();
    job->session = std::make_unique<PullSession>(pull->request_);
    job->pull = std::move(pull);
    const Address to = job->pull->address_;
    begin(std::move(job), to);
  }
  for (const Drop &drop : drops) {
    auto job = std::make_unique<Job>();
    job->session = std::make_unique<DropSession>(drop.id);
    ++drop_jobs_;
    begin(std::move(job), drop.from);
  }
}

void Client::begin(std::unique_ptr<Job> job, const Address &to) {
  const uint64_t id = ++serial_;
  job->begin = job->last_byte = Clock::now();
  job->channel = make_channel(*job->session, Side::client, options_.key);
  const int error = connect_to(to, job->socket);
  Job &begun = *jobs_.emplace(id, std::move(job)).first->second;
  if (error == 0 && poller_.add(begun.socket.fd(), begun.events, id)) return;
  end(begun, LS_KV_NO_ROUTE, std::string("cannot connect to the sender: ") + std::strerror(error));
  remove(id);
}

// False: the job is at its end.
bool Client::serve(Job &job, uint64_t id, uint32_t ready) {
  if (!job.connected) {
    if (const int error = socket_error(job.socket.fd()); error != 0) {
      end(job, LS_KV_NO_ROUTE, std::string("cannot connect to the sender: ") + std::strerror(error));
      return false;
    }
    if (!(ready & EPOLLOUT)) return true;
    job.connected = true;
  }
  // Bytes land in the pages under this lock; whoever cancels takes it, too.
  std::unique_lock<std::mutex> memory;
  if (job.pull) {
    if (job.pull->cancelled_) return true;  // sweep() ends it
    memory = std::unique_lock(job.pull->memory_);
    if (job.pull->cancelled_) return true;
  }
  Channel &channel = *job.channel;
  bool closed = channel.sending() && channel.send(job.socket, kBudget) == Flow::closed;
  const uint64_t before = channel.bytes_received();
  const Flow flow = channel.receive(job.socket, kBudget);
  if (channel.bytes_received() != before) job.last_byte = Clock::now();
  // What the answer makes us say: an acknowledgement, a proof, an alert.
  if (!closed && channel.sending()) closed = channel.send(job.socket, kBudget) == Flow::closed;
  if (memory) memory.unlock();
  if (job.session->over()) {
    // An acknowledgement that does not fit into the socket's buffer at once would be odd; then it waits for its turn.
    if (!closed && channel.sending()) {
      if (job.events != EPOLLOUT) poller_.change(job.socket.fd(), job.events = EPOLLOUT, id);
      return true;
    }
    if (job.pull) {
      const auto &session = static_cast<const PullSession &>(*job.session);
      end(job, session.reason(), session.text());
    }
    return false;
  }
  if (flow == Flow::failed) {
    end(job, channel.failure().reason, channel.failure().text);
    return false;
  }
  if (closed || flow == Flow::closed) {
    end(job, LS_KV_RESET, "the sender closed the connection");
    return false;
  }
  if (const size_t low_water = std::min(channel.awaited(), kLowWater); low_water != job.low_water) wake_at(job.socket.fd(), job.low_water = low_water);
  const uint32_t wanted = EPOLLIN | (channel.sending() ? EPOLLOUT : 0u);
  if (wanted != job.events) poller_.change(job.socket.fd(), job.events = wanted, id);
  return true;
}

void Client::end(Job &job, ls_kv_end reason, const std::string &text) {
  if (!job.pull) return;
  Pull &pull = *job.pull;
  // What has landed may still be on its way into the pages, and these are given away when the sequence is closed.
  if (reason != LS_KV_DONE && pull.request_.flush) pull.request_.flush();
  // After these, the sender has nothing to drop.
  const bool gone = reason == LS_KV_DONE || reason == LS_KV_UNKNOWN || reason == LS_KV_USED || reason == LS_KV_EXPIRED || reason == LS_KV_DROPPED;
  if (!gone) drop(pull.address_, pull.request_.id);
  endings_.add({pull.slot_, pull.serial_, reason, pull.request_.id, static_cast<const PullSession &>(*job.session).kv_received(), micros_since(job.begin), text});
}

void Client::remove(uint64_t id) {
  const auto it = jobs_.find(id);
  if (it->second->pull) --active_;
  else --drop_jobs_;
  jobs_.erase(it);
}

Clock::time_point Client::sweep() {
  const auto now = Clock::now();
  auto next = Clock::time_point::max();
  std::vector<uint64_t> over;
  for (const auto &[id, job] : jobs_) {
    const bool cancelled = job->pull && job->pull->cancelled_;
    auto deadline = job->begin + (job->pull ? options_.connection : std::min(options_.connection, options_.connect + options_.idle));
    deadline = std::min(deadline, job->connected ? job->last_byte + options_.idle : job->begin + options_.connect);
    if (!cancelled && now < deadline) {
      next = std::min(next, deadline);
      continue;
    }
    if (cancelled) drop(job->pull->address_, job->pull->request_.id);
    else end(*job, job->connected ? LS_KV_TIMEOUT : LS_KV_NO_ROUTE, job->connected ? "the sender was too slow or silent" : "no connection to the sender in time");
    over.push_back(id);
  }
  for (const uint64_t id : over) remove(id);
  return over.empty() ? next : now;
}

}  // namespace ls::kv
