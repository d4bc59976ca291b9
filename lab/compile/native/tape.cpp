// A compiled piece as a straight line of steps over registers, run without Python: calls of operators, views, new tensors and
// generated loops; and a whole forward pass as a line of pieces and attention. Python takes some microseconds for each of them, which for one token is as long as the work itself.
//
// Sizes are a * T + b, with T the number of tokens. A step drops the registers that nothing behind it reads.

#include <ATen/EmptyTensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/inductor/inductor_ops.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include <array>
#include <memory>
#include <utility>
#include <vector>

namespace {

using c10::IValue;
using Registers = std::vector<IValue>;
using Integers = std::vector<int64_t>;
using Steps = std::vector<std::unique_ptr<struct Step>>;

struct Size {
  int64_t per_token, fixed;

  int64_t of(int64_t tokens) const { return per_token * tokens + fixed; }
};

// Sizes, which arrive as (a, b) one behind the other.
class Shape {
 public:
  explicit Shape(const Integers& pairs) {
    TORCH_CHECK(pairs.size() % 2 == 0 && pairs.size() / 2 <= kMostDims, "tape: a shape is at most ", kMostDims, " pairs");
    for (size_t i = 0; i < pairs.size(); i += 2) sizes_.push_back({pairs[i], pairs[i + 1]});
  }

  at::IntArrayRef of(int64_t tokens, std::array<int64_t, 8>& to) const {
    for (size_t i = 0; i < sizes_.size(); i++) to[i] = sizes_[i].of(tokens);
    return {to.data(), sizes_.size()};
  }

 private:
  static constexpr size_t kMostDims = 8;
  std::vector<Size> sizes_;
};

struct Step {
  Integers dropped;

  virtual ~Step() = default;
  virtual void run(Registers& registers, int64_t tokens) const = 0;
};

enum ArgumentKind : int64_t { kRegister, kSize, kReal, kFlag, kNone };  // as lab/compile/tape.py has them

struct CallOperator final : Step {
  struct Argument {
    ArgumentKind kind;
    Size size;       // of a kRegister the first is its number
    IValue constant;  // of the other kinds
  };
  c10::OperatorHandle op;
  std::vector<Argument> arguments;
  Integers outputs;

  explicit CallOperator(c10::OperatorHandle op) : op(std::move(op)) {}

  void run(Registers& registers, int64_t tokens) const override {
    torch::jit::Stack stack;
    stack.reserve(std::max(arguments.size(), outputs.size()));
    for (const Argument& argument : arguments) {
      if (argument.kind == kRegister) {
        stack.push_back(registers[argument.size.per_token]);
      } else if (argument.kind == kSize) {
        stack.emplace_back(argument.size.of(tokens));
      } else {
        stack.push_back(argument.constant);
      }
    }
    op.callBoxed(stack);
    for (size_t i = 0; i < outputs.size(); i++) registers[outputs[i]] = std::move(stack[i]);
  }
};

struct View final : Step {
  int64_t from, to;
  Shape sizes, strides;
  Size offset;

  View(int64_t from, int64_t to, Shape sizes, Shape strides, Size offset)
      : from(from), to(to), sizes(std::move(sizes)), strides(std::move(strides)), offset(offset) {}

  void run(Registers& registers, int64_t tokens) const override {
    std::array<int64_t, 8> size, stride;
    registers[to] = torch::inductor::_reinterpret_tensor(registers[from].toTensor(), sizes.of(tokens, size),
                                                         strides.of(tokens, stride), offset.of(tokens));
  }
};

struct NewTensor final : Step {
  int64_t to;
  at::ScalarType dtype;
  Shape sizes, strides;

  NewTensor(int64_t to, at::ScalarType dtype, Shape sizes, Shape strides)
      : to(to), dtype(dtype), sizes(std::move(sizes)), strides(std::move(strides)) {}

  void run(Registers& registers, int64_t tokens) const override {
    std::array<int64_t, 8> size, stride;
    registers[to] = at::Tensor(at::detail::empty_strided_cpu(sizes.of(tokens, size), strides.of(tokens, stride), dtype));
  }
};

// A function that Inductor wrote: it takes addresses and sizes, all of them as wide as a register.
struct CallLoop final : Step {
  using Arguments = std::array<int64_t, 16>;
  struct Argument {
    bool is_tensor;
    Size size;  // of a tensor the first is its register
  };
  const void* loop;
  std::vector<Argument> arguments;

  explicit CallLoop(const void* loop) : loop(loop) {}

  void run(Registers& registers, int64_t tokens) const override {
    Arguments values{};
    for (size_t i = 0; i < arguments.size(); i++) {
      const Argument& argument = arguments[i];
      values[i] = argument.is_tensor ? reinterpret_cast<int64_t>(registers[argument.size.per_token].toTensor().data_ptr())
                                     : argument.size.of(tokens);
    }
    call(values, std::make_index_sequence<std::tuple_size_v<Arguments>>());
  }

 private:
  template <size_t>
  using Integer = int64_t;

  // Arguments past those that the function takes are in registers and stack slots that it does not look at.
  template <size_t... I>
  void call(const Arguments& values, std::index_sequence<I...>) const {
    reinterpret_cast<void (*)(Integer<I>...)>(const_cast<void*>(loop))(values[I]...);
  }
};

// The steps of a piece, the same for all layers.
struct Tape : torch::CustomClassHolder {
  const int64_t num_registers;
  Steps steps;

  explicit Tape(int64_t num_registers) : num_registers(num_registers) {}

  // `arguments`: (kind, a, b) one behind the other. A kReal is reals[a].
  void call_operator(const std::string& name, const std::string& overload, const Integers& arguments,
                     const std::vector<double>& reals, Integers outputs, Integers dropped) {
    auto step = std::make_unique<CallOperator>(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str()));
    for (size_t i = 0; i < arguments.size(); i += 3) {
      const auto kind = static_cast<ArgumentKind>(arguments[i]);
      const Size size{arguments[i + 1], arguments[i + 2]};
      IValue constant;
      if (kind == kReal) constant = reals.at(size.per_token);
      if (kind == kFlag) constant = size.per_token != 0;
      if (kind == kRegister) check(size.per_token);
      step->arguments.push_back({kind, size, std::move(constant)});
    }
    for (const int64_t to : outputs) check(to);
    step->outputs = std::move(outputs);
    add(std::move(step), std::move(dropped));
  }

  void view(int64_t from, int64_t to, const Integers& sizes, const Integers& strides, const Integers& offset, Integers dropped) {
    check(from), check(to);
    add(std::make_unique<View>(from, to, Shape(sizes), Shape(strides), Size{offset.at(0), offset.at(1)}), std::move(dropped));
  }

  void new_tensor(int64_t to, const at::Tensor& like, const Integers& sizes, const Integers& strides, Integers dropped) {
    check(to);
    add(std::make_unique<NewTensor>(to, like.scalar_type(), Shape(sizes), Shape(strides)), std::move(dropped));
  }

  // `arguments` as of call_operator, of the kinds kRegister and kSize.
  void call_loop(int64_t address, const Integers& arguments, Integers dropped) {
    auto step = std::make_unique<CallLoop>(reinterpret_cast<const void*>(address));
    TORCH_CHECK(arguments.size() / 3 <= std::tuple_size_v<CallLoop::Arguments>, "tape: a loop takes too many arguments");
    for (size_t i = 0; i < arguments.size(); i += 3) {
      if (arguments[i] == kRegister) check(arguments[i + 1]);
      step->arguments.push_back({arguments[i] == kRegister, {arguments[i + 1], arguments[i + 2]}});
    }
    add(std::move(step), std::move(dropped));
  }

  void check(int64_t number) const { TORCH_CHECK_INDEX(0 <= number && number < num_registers, "tape: no register ", number); }

  void add(std::unique_ptr<Step> step, Integers dropped) {
    for (const int64_t number : dropped) check(number);
    step->dropped = std::move(dropped);
    steps.push_back(std::move(step));
  }
};

// A tape with one layer's weights in their registers; `inputs` and `outputs` are the registers of what run takes and gives.
struct BoundTape : torch::CustomClassHolder {
  c10::intrusive_ptr<Tape> tape;
  Registers registers;
  Integers inputs, outputs;

  BoundTape(c10::intrusive_ptr<Tape> of, const Integers& places, const std::vector<at::Tensor>& weights, Integers inputs,
            Integers outputs)
      : tape(std::move(of)), registers(tape->num_registers), inputs(std::move(inputs)), outputs(std::move(outputs)) {
    TORCH_CHECK(places.size() == weights.size(), "tape: as many places as weights are wanted");
    for (size_t i = 0; i < places.size(); i++) registers.at(places[i]) = weights[i];
    for (const int64_t number : this->inputs) tape->check(number);
    for (const int64_t number : this->outputs) tape->check(number);
  }

  int64_t address() const { return reinterpret_cast<int64_t>(this); }
};

// Run the steps on registers that hold all inputs.
void run_steps(const Tape& tape, Registers& registers, int64_t tokens) {
  for (const auto& step : tape.steps) {
    step->run(registers, tokens);
    for (const int64_t number : step->dropped) registers[number] = IValue();
  }
}

// `address` is that of a BoundTape, which the caller keeps alive: to be handed the object costs more than most pieces take.
std::vector<at::Tensor> run(int64_t address, const std::vector<at::Tensor>& inputs, int64_t tokens) {
  const auto* bound = reinterpret_cast<const BoundTape*>(address);
  TORCH_CHECK(inputs.size() == bound->inputs.size(), "tape: takes ", bound->inputs.size(), " tensors");
  Registers registers = bound->registers;
  for (size_t i = 0; i < inputs.size(); i++) registers[bound->inputs[i]] = inputs[i];
  run_steps(*bound->tape, registers, tokens);
  std::vector<at::Tensor> outputs;
  outputs.reserve(bound->outputs.size());
  for (const int64_t number : bound->outputs) outputs.push_back(registers[number].toTensor());
  return outputs;
}

// A bound tape as a step of another one: its inputs come from these registers, its outputs go to those.
struct CallTape final : Step {
  c10::intrusive_ptr<BoundTape> bound;
  Integers from, to;

  CallTape(c10::intrusive_ptr<BoundTape> bound, Integers from, Integers to)
      : bound(std::move(bound)), from(std::move(from)), to(std::move(to)) {}

  void run(Registers& registers, int64_t tokens) const override {
    Registers inner = bound->registers;
    for (size_t i = 0; i < from.size(); i++) inner[bound->inputs[i]] = registers[from[i]];
    run_steps(*bound->tape, inner, tokens);
    for (size_t i = 0; i < to.size(); i++) registers[to[i]] = std::move(inner[bound->outputs[i]]);
  }
};

void call_tape(const c10::intrusive_ptr<Tape>& tape, c10::intrusive_ptr<BoundTape> bound, Integers from, Integers to,
               Integers dropped) {
  TORCH_CHECK(from.size() == bound->inputs.size() && to.size() == bound->outputs.size(), "tape: takes ", bound->inputs.size(),
              " registers and fills ", bound->outputs.size());
  for (const int64_t number : from) tape->check(number);
  for (const int64_t number : to) tape->check(number);
  tape->add(std::make_unique<CallTape>(std::move(bound), std::move(from), std::move(to)), std::move(dropped));
}

}  // namespace

TORCH_LIBRARY(LAB_NAMESPACE, library) {
  library.class_<Tape>("Tape")
      .def(torch::init<int64_t>())
      .def("call_operator", &Tape::call_operator)
      .def("view", &Tape::view)
      .def("new_tensor", &Tape::new_tensor)
      .def("call_loop", &Tape::call_loop);
  library.class_<BoundTape>("BoundTape")
      .def(torch::init<c10::intrusive_ptr<Tape>, const Integers&, const std::vector<at::Tensor>&, Integers, Integers>())
      .def("address", &BoundTape::address);
  library.def("call_tape", &call_tape);
  library.def("run", &run);
}
