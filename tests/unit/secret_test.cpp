// The job's secret: where it comes from, what is refused, and that it stays secret. Also muster secret, which makes
// one.

#include "muster/base/secret.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <new>
#include <type_traits>

#include "base/random.h"
#include "muster/base/error.h"
#include "support/places.h"

namespace muster {
namespace {

using test::kMusterCommand;

class SecretTest : public testing::Test {
 protected:
  ~SecretTest() override { std::filesystem::remove_all(folder_); }

  std::string path(const std::string& name) const { return folder_ / name; }
  std::string file(const std::string& text, mode_t mode = 0600) const {
    const std::string name = path("secret" + random_hex(4));
    std::ofstream(name) << text;
    EXPECT_EQ(::chmod(name.c_str(), mode), 0);
    return name;
  }

 private:
  struct Folder : std::filesystem::path {
    Folder() : path(testing::TempDir() + "/muster-secret-" + random_hex(8)) {
      std::filesystem::create_directory(*this);
    }
  } folder_;
};

template <typename Refused, typename Fn>
std::string refusal(Fn fn) {
  try {
    fn();
  } catch (const Refused& error) {
    return error.what();
  }
  ADD_FAILURE() << "not refused";
  return {};
}

// The output of muster with these arguments, and its exit status.
std::pair<std::string, int> run_muster(const std::string& words) {
  FILE* pipe = ::popen((std::string("2>&1 ") + kMusterCommand + " " + words).c_str(), "r");
  std::string output;
  std::array<char, 4096> buffer;
  while (const size_t n = std::fread(buffer.data(), 1, buffer.size(), pipe)) output.append(buffer.data(), n);
  const int status = ::pclose(pipe);
  return {output, WIFEXITED(status) ? WEXITSTATUS(status) : -1};
}

TEST_F(SecretTest, EachIsNew) {
  const auto one = Secret::generate(), other = Secret::generate();
  EXPECT_FALSE(one == other);
  EXPECT_TRUE(one == Secret(one));
  EXPECT_EQ(one.hex().size(), 64u);
  EXPECT_TRUE(Secret::from_text(one.hex()) == one);
}

// Expected values from another implementation of RFC 5869: python3 with hmac and hashlib.
TEST_F(SecretTest, DerivesAKeyForEachLabel) {
  const auto secret = Secret::from_text(std::string(64, '7'));
  EXPECT_EQ(secret.derive("store tls psk").hex(), "99dab17f31f462dd40ef1c2e6e88f83faba423e09c368e45556855919d4ee754");
  EXPECT_FALSE(secret.derive("one") == secret.derive("two"));
  EXPECT_FALSE(secret.derive("") == secret);
  EXPECT_TRUE(secret.derive("one") == Secret(secret).derive("one"));
}

TEST_F(SecretTest, AnyLongTextIsOne) {
  const auto secret = Secret::from_text("correct horse battery staple");
  EXPECT_EQ(secret.hex(), "5de84e4c938bf70a351982684bd620889af95b065d100246ea49f92a0bb97a37");
  EXPECT_TRUE(Secret::from_text(" \t correct horse battery staple\r\n") == secret);
  EXPECT_FALSE(Secret::from_text("correct horse battery stapl3") == secret);
  EXPECT_TRUE(Secret::from_text(std::string(64, 'A')) == Secret::from_text(std::string(64, 'a')));  // digits
  EXPECT_FALSE(Secret::from_text(std::string(63, 'a') + "g") == Secret::from_text(std::string(64, 'a')));
  EXPECT_NO_THROW(Secret::from_text("0123456789abcdef"));
  const auto message = refusal<InvalidArgument>([] { Secret::from_text("swordfish\n"); });
  EXPECT_EQ(message.find("swordfish"), std::string::npos) << message;
  EXPECT_NE(message.find("9 bytes"), std::string::npos) << message;
  EXPECT_THROW(Secret::from_text(""), InvalidArgument);
  EXPECT_THROW(Secret::from_text(std::string(100, ' ')), InvalidArgument);
}

template <typename T>
concept Printable = requires(std::ostream& out, const T& value) {
  out << value;
};

TEST_F(SecretTest, CannotBePrinted) {
  static_assert(Printable<int>);
  static_assert(!Printable<Secret>);
}

TEST_F(SecretTest, IsWipedAtItsEnd) {
  alignas(Secret) std::array<unsigned char, sizeof(Secret)> place;
  auto* secret = new (place.data()) Secret(Secret::generate());
  const std::array<unsigned char, sizeof(Secret)> none{};
  EXPECT_NE(std::memcmp(place.data(), none.data(), place.size()), 0);
  secret->~Secret();
  EXPECT_EQ(std::memcmp(place.data(), none.data(), place.size()), 0);
}

TEST_F(SecretTest, FromAFile) {
  const auto secret = Secret::generate();
  EXPECT_TRUE(Secret::from_file(file(secret.hex() + "\n")) == secret);
  EXPECT_TRUE(Secret::from_file(file(secret.hex(), 0400)) == secret);
  EXPECT_EQ(refusal<Unavailable>([&] { Secret::from_file(path("nothing")); }).find("cannot read the secret in"), 0u);
  EXPECT_THROW(Secret::from_file(path("")), InvalidArgument);  // the folder
  EXPECT_THROW(Secret::from_file(file("")), InvalidArgument);
  EXPECT_THROW(Secret::from_file(file(std::string(100'000, 'x'))), InvalidArgument);
  const std::string short_one = file("short");
  EXPECT_EQ(refusal<InvalidArgument>([&] { Secret::from_file(short_one); }).find(short_one), 0u);
  ASSERT_EQ(::mkfifo(path("fifo").c_str(), 0600), 0);
  EXPECT_THROW(Secret::from_file(path("fifo")), InvalidArgument);  // immediately, though nobody writes
}

TEST_F(SecretTest, AFileThatOthersMayReadIsRefused) {
  for (const mode_t mode : {0644, 0640, 0604, 0660, 0622, 0601}) {
    const std::string name = file(Secret::generate().hex(), mode);
    const auto message = refusal<Unauthorized>([&] { Secret::from_file(name); });
    EXPECT_NE(message.find("chmod 600 " + name), std::string::npos) << message;
  }
}

TEST_F(SecretTest, AFileOfAnotherUserIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give files away";
  const std::string name = file(Secret::generate().hex());
  ASSERT_EQ(::chown(name.c_str(), 65534, 65534), 0);
  EXPECT_NE(refusal<Unauthorized>([&] { Secret::from_file(name); }).find("user 65534"), std::string::npos);
}

TEST_F(SecretTest, FromTheEnvironment) {
  ::unsetenv("MUSTER_SECRET");
  EXPECT_FALSE(Secret::from_environment());
  const auto secret = Secret::generate();
  ::setenv("MUSTER_SECRET", secret.hex().c_str(), 1);
  EXPECT_TRUE(Secret::from_environment() == secret);
  ::setenv("MUSTER_SECRET", "swordfish", 1);
  const auto message = refusal<InvalidArgument>([] { Secret::from_environment(); });
  EXPECT_NE(message.find("MUSTER_SECRET"), std::string::npos);
  EXPECT_EQ(message.find("swordfish"), std::string::npos) << message;
  ::unsetenv("MUSTER_SECRET");
}

TEST_F(SecretTest, TheCommandMakesAPrivateFileOnce) {
  ::umask(0);
  const auto [output, status] = run_muster("secret " + path("new"));
  ::umask(022);
  EXPECT_EQ(status, 0) << output;
  EXPECT_EQ(output, "");
  struct stat made {};
  ASSERT_EQ(::stat(path("new").c_str(), &made), 0);
  EXPECT_EQ(made.st_mode & 0777, 0600u);
  const auto secret = Secret::from_file(path("new"));
  const auto [again, refused] = run_muster("secret " + path("new"));
  EXPECT_EQ(refused, 2) << again;
  EXPECT_NE(again.find("exists already"), std::string::npos) << again;
  EXPECT_TRUE(Secret::from_file(path("new")) == secret);
  EXPECT_EQ(run_muster("secret " + path("no/folder")).second, 1);
}

TEST_F(SecretTest, TheCommandPrintsOneWithoutAFile) {
  const auto [one, status] = run_muster("secret");
  EXPECT_EQ(status, 0);
  EXPECT_EQ(one.size(), 65u);
  EXPECT_EQ(Secret::from_text(one).hex() + "\n", one);
  EXPECT_NE(run_muster("secret").first, one);
  EXPECT_EQ(run_muster("secret > /dev/full").second, 1);
  EXPECT_EQ(run_muster("secret one two").second, 2);
  EXPECT_EQ(run_muster("secret --help").second, 0);
}

}  // namespace
}  // namespace muster
