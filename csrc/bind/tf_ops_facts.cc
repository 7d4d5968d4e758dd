// The kernels that submit nothing.
#include <utility>

#include "bind/tf_ops_kernels.h"
#include "include/kolovod.h"

namespace kolovod::tensorflow {
namespace {

struct Fact {
  int (*ask)(kolovod_engine*) = nullptr;  // null: whether there is such an engine
  int32_t process_set = 0;
};

}  // namespace

int ToTensorFlow(int code) {
  switch (code) {
    case KOLOVOD_OK:
      return 0;
    case KOLOVOD_INVALID_ARGUMENT:
      return kInvalidArgument;
    case KOLOVOD_DUPLICATE_NAME:
      return 6;  // ALREADY_EXISTS
    case KOLOVOD_MISMATCH:
      return 9;  // FAILED_PRECONDITION
    case KOLOVOD_RANK_LOST:
    case KOLOVOD_RANK_LEFT:
    case KOLOVOD_SHUT_DOWN:
    case KOLOVOD_INTERRUPTED:
    case KOLOVOD_LATE:
      return 10;  // ABORTED; TensorFlow takes UNAVAILABLE for a matter of its own network
    default:
      return kInternal;
  }
}

void* CreateFact(TF_OpKernelConstruction* construction) {
  static const std::pair<const char*, int (*)(kolovod_engine*)> kFacts[] = {
      {"rank", kolovod_rank},
      {"size", kolovod_size},
      {"local_rank", kolovod_local_rank},
      {"local_size", kolovod_local_size},
      {"cross_rank", kolovod_cross_rank},
      {"cross_size", kolovod_cross_size},
      {"included", nullptr}};
  Attributes attributes(construction);
  auto fact = std::make_unique<Fact>();
  fact->process_set = static_cast<int32_t>(attributes.Int("process_set"));
  const std::string name = attributes.Text("fact");
  if (!attributes.Complete()) return nullptr;
  for (const auto& [known, ask] : kFacts) {
    if (name != known) continue;
    fact->ask = ask;
    return fact.release();
  }
  const StatusPtr status = NewStatus();
  tf.SetStatus(status.get(), kInvalidArgument, ("there is no fact '" + name + "'").c_str());
  tf.OpKernelConstruction_Failure(construction, status.get());
  return nullptr;
}

void ComputeFact(void* fact_pointer, TF_OpKernelContext* context) {
  const Fact& fact = *static_cast<Fact*>(fact_pointer);
  const StatusPtr status = NewStatus();
  const bool asks_whether = fact.ask == nullptr;
  // Without a world nobody is in any set, and whoever asks has not begun.
  kolovod_engine* engine = kolovod_current(asks_whether ? 0 : fact.process_set);
  int value = -1;
  if (engine != nullptr) {
    value = asks_whether ? kolovod_current(fact.process_set) != nullptr : fact.ask(engine);
  }
  if (value < 0) {
    tf.SetStatus(status.get(), ToTensorFlow(KOLOVOD_SHUT_DOWN), kolovod_error_message());
    return tf.OpKernelContext_Failure(context, status.get());
  }
  const TensorPtr output(tf.AllocateOutput(context, 0, kInt32, nullptr, 0, sizeof(int32_t), status.get()));
  if (!Ok(status)) return tf.OpKernelContext_Failure(context, status.get());
  *static_cast<int32_t*>(tf.TensorData(output.get())) = value;
}

void DeleteFact(void* fact) { delete static_cast<Fact*>(fact); }

// TensorFlow's own words would be that XLA knows no such op.
void RefuseToCompile(void*, TF_OpKernelContext* context) {
  const StatusPtr status = NewStatus();
  tf.SetStatus(status.get(), kInvalidArgument,
               "a function with jit_compile=True contains an operation of Kolovod, which XLA cannot compile: "
               "set jit_compile=False for it (in Keras: model.compile(jit_compile=False)). Functions that it "
               "calls, and that only compute, may have jit_compile=True");
  tf.OpKernelContext_Failure(context, status.get());
}

}  // namespace kolovod::tensorflow
