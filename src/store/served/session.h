// The server's side of one connection, over any stream of asio's: a Unix-domain socket, later TLS over TCP.
//
// Two coroutines on the server's one thread share a Session:
//
//   serve()   reads frames, one after another, and immediately answers requests that need not wait. It always reads,
//             also while a request waits, so it notices immediately when the client ends.
//   finish()  is started for a request that must wait. It loops over SharedTable::find() and sleeps on `bell` in
//             between. The bell rings when the table changes, when the client has gone, and at the deadline.
//
// A request that comes while another waits breaks the protocol. A request that comes while finish() still
// writes does not: it waits until finish() has ended.
//
// Thread-safety: everything here runs on the thread of the io_context; only SessionWaiter::wake() may be called from
// others.
#pragma once

#include <array>
#include <asio/awaitable.hpp>
#include <asio/buffer.hpp>
#include <asio/co_spawn.hpp>
#include <asio/read.hpp>
#include <asio/redirect_error.hpp>
#include <asio/socket_base.hpp>
#include <asio/steady_timer.hpp>
#include <asio/use_awaitable.hpp>
#include <asio/write.hpp>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "muster/base/error.h"
#include "store/served/answers.h"
#include "store/served/protocol.h"
#include "store/served/task_poster.h"
#include "store/table/shared_table.h"

namespace muster::store {

// Answers a request that need not wait, or that `answers` (if any) has answered before; nullopt if it has to wait.
std::optional<Reply> answer(SharedTable& table, Answers* answers, const Request& request);
// What a waiting request waits for, and the reply when that has been found.
Want want_of(const Request& request);
Reply reply_to(const Request& request, SharedTable::Versioned found);

template <typename Stream>
struct Session {
  enum class State { kReading, kWaiting, kWriting };

  Session(Stream connected, std::string client, std::shared_ptr<SharedTable> table, std::shared_ptr<TaskPoster> tasks,
          std::shared_ptr<Answers> answers = nullptr)
      : stream(std::move(connected)),
        peer(std::move(client)),
        table(std::move(table)),
        tasks(std::move(tasks)),
        answers(std::move(answers)),
        bell(stream.get_executor()) {}
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;
  ~Session() { end(); }

  // shutdown() ends the connection even if a child of this process, forked without exec, holds a copy of the socket.
  void end() {
    gone = true;
    bell.cancel();
    asio::error_code ignored;
    stream.lowest_layer().shutdown(asio::socket_base::shutdown_both, ignored);
    stream.lowest_layer().close(ignored);
  }

  Stream stream;
  std::string peer;  // for the log
  std::shared_ptr<SharedTable> table;
  std::shared_ptr<TaskPoster> tasks;
  std::shared_ptr<Answers> answers;  // null if connections cannot be cut, so that no request is sent again
  asio::steady_timer bell;
  State state = State::kReading;
  bool gone = false;
};

// Rings a session's bell from any thread; holds nothing alive.
template <typename Stream>
class SessionWaiter final : public Waiter {
 public:
  explicit SessionWaiter(const std::shared_ptr<Session<Stream>>& session) : tasks_(session->tasks), session_(session) {}
  void wake() override {
    tasks_->post([session = session_] {
      if (const auto alive = session.lock()) alive->bell.cancel();
    });
  }

 private:
  std::shared_ptr<TaskPoster> tasks_;
  std::weak_ptr<Session<Stream>> session_;
};

template <typename Stream>
asio::awaitable<std::string> read_body(Stream& stream) {
  uint32_t size = 0;
  co_await asio::async_read(stream, asio::buffer(&size, sizeof size), asio::use_awaitable);
  if (size > kMaxBody) throw CorruptError(text("a message of ", size, " bytes; at most ", kMaxBody, " are allowed"));
  std::string body(size, '\0');
  co_await asio::async_read(stream, asio::buffer(body), asio::use_awaitable);
  co_return body;
}

template <typename Stream>
asio::awaitable<void> write_reply(Session<Stream>& session, Reply reply) {
  if (session.answers) reply.server = session.answers->server();
  const std::string body = encode(reply);
  const auto size = static_cast<uint32_t>(body.size());
  std::array<asio::const_buffer, 2> parts;
  parts[0] = asio::buffer(&size, sizeof size);
  parts[1] = asio::buffer(body);
  co_await asio::async_write(session.stream, parts, asio::use_awaitable);
}

// `request` points into `body`.
template <typename Stream>
asio::awaitable<void> finish(std::shared_ptr<Session<Stream>> session, std::string body, Request request) {
  const auto waiter = std::make_shared<SessionWaiter<Stream>>(session);
  struct Forget {  // also when the server destroys this coroutine in the middle
    SharedTable& table;
    Waiter& waiter;
    ~Forget() { table.forget(waiter); }
  } forget{*session->table, *waiter};

  const Deadline deadline = deadline_of(request.wait_ms);
  const Want want = want_of(request);
  std::optional<Reply> reply;
  while (!session->gone && !reply) {
    if (auto found = session->table->find(want, waiter)) {
      reply = reply_to(request, *std::move(found));
    } else if (deadline.passed()) {
      reply = error_reply(session->table->timed_out(want));
    } else {
      asio::error_code ignored;  // whether it rang or timed out, look again
      session->bell.expires_at(deadline.when());
      co_await session->bell.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
  }
  if (session->gone) co_return;
  session->state = Session<Stream>::State::kWriting;
  try {
    co_await write_reply(*session, *std::move(reply));
    session->state = Session<Stream>::State::kReading;
    session->bell.cancel();
  } catch (const std::exception&) {
    session->end();  // the client has gone; serve() ends, too
  }
}

// Reads and answers until the client has gone or breaks the protocol.
template <typename Stream>
asio::awaitable<void> serve_requests(std::shared_ptr<Session<Stream>> session) {
  using State = typename Session<Stream>::State;
  for (;;) {
    std::string body = co_await read_body(session->stream);
    if (session->state == State::kWaiting) throw CorruptError("a request while another waits");
    while (session->state == State::kWriting && !session->gone) {
      asio::error_code ignored;
      session->bell.expires_at(Deadline::never().when());
      co_await session->bell.async_wait(asio::redirect_error(asio::use_awaitable, ignored));
    }
    Request request = decode_request(body);
    if (auto reply = answer(*session->table, session->answers.get(), request)) {
      co_await write_reply(*session, *std::move(reply));
      continue;
    }
    session->state = State::kWaiting;
    const auto report = [session](std::exception_ptr error) {
      if (error) session->end();
    };
    asio::co_spawn(session->stream.get_executor(), finish(session, std::move(body), std::move(request)), report);
  }
}

template <typename Stream>
asio::awaitable<void> serve(std::shared_ptr<Session<Stream>> session) {
  try {
    co_await serve_requests(session);
  } catch (const asio::system_error&) {
    // The client closed the connection or died: the ordinary end.
  } catch (const std::exception& error) {
    MUSTER_LOG(kWarning) << "store: closed the connection of " << session->peer << ", which sent " << error.what();
  }
  session->end();
}

}  // namespace muster::store
