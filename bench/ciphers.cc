// How fast this machine encrypts and decrypts, through the libcrypto that is there at run time
// (docs/design/network.md). A measurement, no part of the product.
//
//   g++ -O2 -std=c++20 bench/ciphers.cc -o build/ciphers -ldl && build/ciphers
//
// No header of OpenSSL is needed: the EVP functions have kept their signatures from 1.1.1 to 3.x.
#include <dlfcn.h>
#include <time.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

struct Context;
struct Cipher;
struct Engine;

struct Crypto {
  Context* (*make)();
  const Cipher* (*by_name)(const char*);
  int (*start_sealing)(Context*, const Cipher*, Engine*, const uint8_t* key, const uint8_t* nonce);
  int (*seal)(Context*, uint8_t* out, int* written, const uint8_t* in, int bytes);
  int (*finish_sealing)(Context*, uint8_t* out, int* written);
  int (*start_opening)(Context*, const Cipher*, Engine*, const uint8_t* key, const uint8_t* nonce);
  int (*open)(Context*, uint8_t* out, int* written, const uint8_t* in, int bytes);
  int (*finish_opening)(Context*, uint8_t* out, int* written);
  int (*control)(Context*, int what, int argument, void* data);
  const char* (*version)(int);
};

constexpr int kGetTag = 0x10, kSetTag = 0x11, kTagBytes = 16;  // EVP_CTRL_AEAD_*

template <class Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr) {
    std::fprintf(stderr, "libcrypto has no %s\n", name);
    std::exit(1);
  }
}

Crypto Load() {
  void* library = nullptr;
  for (const char* name : {"libcrypto.so.3", "libcrypto.so.1.1"}) {
    if (library == nullptr) library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  }
  if (library == nullptr) {
    std::fprintf(stderr, "no libcrypto: %s\n", dlerror());
    std::exit(1);
  }
  Crypto crypto;
  Find(library, "EVP_CIPHER_CTX_new", &crypto.make);
  Find(library, "EVP_get_cipherbyname", &crypto.by_name);
  Find(library, "EVP_EncryptInit_ex", &crypto.start_sealing);
  Find(library, "EVP_EncryptUpdate", &crypto.seal);
  Find(library, "EVP_EncryptFinal_ex", &crypto.finish_sealing);
  Find(library, "EVP_DecryptInit_ex", &crypto.start_opening);
  Find(library, "EVP_DecryptUpdate", &crypto.open);
  Find(library, "EVP_DecryptFinal_ex", &crypto.finish_opening);
  Find(library, "EVP_CIPHER_CTX_ctrl", &crypto.control);
  Find(library, "OpenSSL_version", &crypto.version);
  return crypto;
}

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "%s failed\n", what);
  std::exit(1);
}

// Of processor time, since other processes take turns.
double Now() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Seconds per call, the best of several rounds of about 0.1 s.
template <class Call>
double Best(Call call) {
  double best = 1e9;
  for (int round = 0; round < 7; ++round) {
    int calls = 0;
    const double begin = Now();
    double seconds = 0;
    while (seconds < 0.1) {
      for (int i = 0; i < 8; ++i, ++calls) call();
      seconds = Now() - begin;
    }
    best = std::min(best, seconds / calls);
  }
  return best;
}

}  // namespace

int main() {
  const Crypto crypto = Load();
  std::printf("%s\n%-18s %9s %14s %14s %12s\n", crypto.version(0), "cipher", "bytes", "seal", "open",
              "memcpy");
  for (const char* name : {"id-aes256-GCM", "ChaCha20-Poly1305"}) {
    const Cipher* cipher = crypto.by_name(name);
    Check(cipher != nullptr, name);
    for (const int bytes : {4, 1 << 10, 16 << 10, 256 << 10, 4 << 20}) {
      const auto n = static_cast<size_t>(bytes);
      std::vector<uint8_t> plain(n, 7), sealed(n), opened(n);
      uint8_t key[32] = {1}, nonce[12] = {}, tag[kTagBytes];
      int written = 0;
      Context* sealing = crypto.make();
      Check(crypto.start_sealing(sealing, cipher, nullptr, key, nullptr) == 1, "sealing");
      const double seal_s = Best([&] {
        ++*reinterpret_cast<uint32_t*>(nonce);
        crypto.start_sealing(sealing, nullptr, nullptr, nullptr, nonce);
        crypto.seal(sealing, sealed.data(), &written, plain.data(), bytes);
        crypto.finish_sealing(sealing, sealed.data() + written, &written);
        crypto.control(sealing, kGetTag, kTagBytes, tag);
      });
      Context* opening = crypto.make();
      Check(crypto.start_opening(opening, cipher, nullptr, key, nullptr) == 1, "opening");
      const double open_s = Best([&] {
        crypto.start_opening(opening, nullptr, nullptr, nullptr, nonce);
        crypto.open(opening, opened.data(), &written, sealed.data(), bytes);
        crypto.control(opening, kSetTag, kTagBytes, tag);
        Check(crypto.finish_opening(opening, opened.data() + written, &written) == 1, "the tag");
      });
      Check(opened == plain, "decryption");
      sealed[0] ^= 1;
      crypto.start_opening(opening, nullptr, nullptr, nullptr, nonce);
      crypto.open(opening, opened.data(), &written, sealed.data(), bytes);
      crypto.control(opening, kSetTag, kTagBytes, tag);
      Check(crypto.finish_opening(opening, opened.data() + written, &written) != 1,
            "refusing a changed byte");
      const double copy_s = Best([&] {
        std::memcpy(opened.data(), plain.data(), n);
        asm volatile("" ::"r"(opened.data()) : "memory");
      });
      const double giga = bytes * 1e-9;
      if (bytes < 1024) {
        std::printf("%-18s %9d %11.0f ns %11.0f ns %9.0f ns\n", name, bytes, seal_s * 1e9, open_s * 1e9,
                    copy_s * 1e9);
      } else {
        std::printf("%-18s %9d %9.2f GB/s %9.2f GB/s %7.1f GB/s\n", name, bytes, giga / seal_s, giga / open_s,
                    giga / copy_s);
      }
    }
  }
  return 0;
}
