#include "transport/libcrypto.h"

#include <dlfcn.h>

#include <array>

namespace kolovod {
namespace {

constexpr std::array kNames = {"libcrypto.so.3", "libcrypto.so.1.1"};

// Remembers the first name that is missing.
class Finder {
 public:
  explicit Finder(void* library) : library_(library) {}

  template <class Function>
  void Find(const char* name, Function* function) {
    if (!Try(name, function) && missing_.empty()) missing_ = name;
  }
  template <class Function>
  bool Try(const char* name, Function* function) {
    *function = reinterpret_cast<Function>(dlsym(library_, name));
    return *function != nullptr;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* const library_;
  std::string missing_;
};

// Returns the name of a function that the library lacks, or nothing.
std::string FindAll(void* library, Libcrypto* out) {
  Finder finder(library);
  finder.Find("EVP_CIPHER_CTX_new", &out->new_context);
  finder.Find("EVP_CIPHER_CTX_free", &out->free_context);
  finder.Find("EVP_aes_256_gcm", &out->aes_256_gcm);
  finder.Try("EVP_chacha20_poly1305", &out->chacha20_poly1305);
  finder.Find("EVP_EncryptInit_ex", &out->begin_sealing);
  finder.Find("EVP_EncryptUpdate", &out->seal);
  finder.Find("EVP_EncryptFinal_ex", &out->end_sealing);
  finder.Find("EVP_DecryptInit_ex", &out->begin_opening);
  finder.Find("EVP_DecryptUpdate", &out->open);
  finder.Find("EVP_DecryptFinal_ex", &out->end_opening);
  finder.Find("EVP_CIPHER_CTX_ctrl", &out->control);
  finder.Find("EVP_sha256", &out->sha256);
  finder.Find("HMAC", &out->hmac);
  finder.Find("EVP_PKEY_new_raw_private_key", &out->private_key);
  finder.Find("EVP_PKEY_new_raw_public_key", &out->public_key);
  finder.Find("EVP_PKEY_get_raw_public_key", &out->public_bytes);
  finder.Find("EVP_PKEY_free", &out->free_key);
  finder.Find("EVP_PKEY_CTX_new", &out->new_key_context);
  finder.Find("EVP_PKEY_CTX_free", &out->free_key_context);
  finder.Find("EVP_PKEY_derive_init", &out->begin_deriving);
  finder.Find("EVP_PKEY_derive_set_peer", &out->set_peer);
  finder.Find("EVP_PKEY_derive", &out->derive);
  finder.Find("OpenSSL_version", &out->version_text);
  return finder.missing();
}

}  // namespace

bool Libcrypto::Load(std::span<const char* const> names, Libcrypto* out, std::string* why_not) {
  std::string reasons;
  for (const char* name : names) {
    if (!reasons.empty()) reasons += "; ";
    void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      const char* const said = dlerror();
      reasons += said == nullptr ? name : said;
      continue;
    }
    const std::string missing = FindAll(library, out);
    if (missing.empty()) return true;  // never unloaded: what it made may outlive everybody here
    reasons += std::string(name) + " has no " + missing;
    dlclose(library);
  }
  if (why_not != nullptr) *why_not = reasons.empty() ? "no name to look for" : reasons;
  return false;
}

const Libcrypto* Libcrypto::Get(std::string* why_not) {
  struct Loaded {
    Loaded() : found(Load(kNames, &functions, &reason)) {}
    Libcrypto functions{};
    std::string reason;
    bool found;
  };
  static const Loaded loaded;
  if (!loaded.found && why_not != nullptr) *why_not = loaded.reason;
  return loaded.found ? &loaded.functions : nullptr;
}

}  // namespace kolovod
