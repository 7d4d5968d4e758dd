// Threads as ranks, each with a mesh to all others, over socket pairs or TCP on the loopback interface.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "testing/check.h"
#include "transport/mesh.h"

namespace kolovod::testing {

enum class Wire { kSocketPair, kTcp, kSealed };  // the last: socket pairs whose bytes are encrypted

// Keys of both ends of a connection.
struct KeyPair {
  std::shared_ptr<ConnectionKeys> ends[2] = {std::make_shared<ConnectionKeys>(),
                                             std::make_shared<ConnectionKeys>()};
};

inline Key KeyOf(uint8_t first) {
  std::array<uint8_t, Key::kBytes> bytes{};
  bytes[0] = first;
  return Key(bytes);
}

inline KeyPair MakeKeys(Cipher cipher) {
  CHECK(Libcrypto::Get() != nullptr);  // the machine that tests are run on has OpenSSL
  KeyPair pair;
  for (uint8_t end : {0, 1}) {
    ConnectionKeys& keys = *pair.ends[end];
    keys.cipher = cipher;
    keys.send = KeyOf(end == 0 ? 1 : 2);
    keys.receive = KeyOf(end == 0 ? 2 : 1);
  }
  return pair;
}

// Two connected descriptors.
inline void Connect(Wire wire, int ends[2]) {
  if (wire != Wire::kTcp) {
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    return;
  }
  const int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof(address);
  auto* any = reinterpret_cast<sockaddr*>(&address);
  CHECK(listener >= 0);
  CHECK(bind(listener, any, length) == 0);
  CHECK(listen(listener, 1) == 0);
  CHECK(getsockname(listener, any, &length) == 0);
  ends[0] = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  CHECK(ends[0] >= 0);
  CHECK(connect(ends[0], any, length) == 0);
  ends[1] = accept4(listener, nullptr, nullptr, SOCK_CLOEXEC);
  CHECK(ends[1] >= 0);
  close(listener);
}

// The peers of each rank of a full mesh.
inline std::vector<std::vector<MeshPeer>> ConnectAll(int size, Wire wire) {
  const auto n = static_cast<size_t>(size);
  std::vector<std::vector<MeshPeer>> peers(n, std::vector<MeshPeer>(n));
  for (size_t a = 0; a < n; ++a) {
    for (size_t b = 0; b < n; ++b) peers[a][b].description = "rank " + std::to_string(b) + " on test";
    for (size_t b = 0; b < a; ++b) {
      int ends[2];
      Connect(wire, ends);
      peers[a][b].fd = ends[0];
      peers[b][a].fd = ends[1];
      if (wire != Wire::kSealed) continue;
      const KeyPair keys = MakeKeys(a % 2 == 0 ? Cipher::kAes256Gcm : Cipher::kChaCha20Poly1305);
      peers[a][b].keys = keys.ends[0];
      peers[b][a].keys = keys.ends[1];
    }
  }
  return peers;
}

inline void RunMesh(int size, Wire wire, const std::function<void(Mesh&)>& body,
                    const MeshOptions& options = MeshOptions()) {
  std::vector<std::vector<MeshPeer>> peers = ConnectAll(size, wire);
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r) {
    threads.emplace_back([&, r] {
      std::unique_ptr<Mesh> mesh;
      CHECK_OK(Mesh::Create(r, std::move(peers[static_cast<size_t>(r)]), options, &mesh));
      body(*mesh);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace kolovod::testing
