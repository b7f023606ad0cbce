"""Translates PTX of nvcc's to C++ that runs under the emulation of tests/cpp/emulation.

A register becomes a variable that holds its bits, a label a label, and an instruction a call of the
function of its name in tests/cpp/ptx/instructions.h: `add.rn.f32 %f1, %f2, %f3` is
`r_f[1] = bits(op_add_rn<f32>(r_f[2], r_f[3]))`. An instruction that is not there does not compile,
so nothing is left out unnoticed.
"""

import re

TYPES = {"pred", "f16x2", "bf16x2"} | {
    f"{kind}{bits}" for kind in "bsuf" for bits in (8, 16, 32, 64)
}
BITS = re.compile(r"[bsuf](\d+)")
SPECIAL = {
    "%tid.x": "threadIdx.x",
    "%ctaid.x": "blockIdx.x",
    "%ntid.x": "blockDim.x",
    "%nctaid.x": "gridDim.x",
    "%laneid": "(threadIdx.x % 32)",
}
SPACES = ("param", "global", "shared", "local")
ENTRY = re.compile(r"\.visible \.entry ([\w$]+)\((.*?)\)\s*(?:\.\w+[^\n{]*\n)*\{(.*?)\n\}", re.S)
VARIABLE = r"\.align (\d+) \.(\w+)\s+([\w$]+)(?:\[(\d+)\])?;"
SHARED = re.compile(r"\.shared " + VARIABLE)
LOCAL = re.compile(r"\.local " + VARIABLE)
PARAMETER = re.compile(r"\.param (?:\.align (\d+) )?\.(\w+) ([\w$]+)(?:\[(\d+)\])?")


def bytes_of(type_name):
    return int(BITS.fullmatch(type_name)[1]) // 8


def placed(matches):
    """Offsets by name, and the end, of variables: (alignment, type, name, count), "" for none."""
    offsets, end = {}, 0
    for alignment, type_name, name, count in matches:
        size = bytes_of(type_name)
        alignment = int(alignment or size)
        end = -(-end // alignment) * alignment
        offsets[name] = end
        end += size * int(count or 1)
    return offsets, end


def operands(text):
    """Split at the commas outside of braces and brackets."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,{\[])+", text)]


class Kernel:
    """One .entry: its name, the bytes of its parameters, and its C++."""

    def __init__(self, name, parameters, body, shared):
        self.name = name
        self.parameters, self.parameter_bytes = placed(PARAMETER.findall(parameters))
        self.shared = shared
        self.local, self.local_bytes = placed(LOCAL.findall(body))
        self.body = re.sub(r"\.(local|shared) [^;]*;", "", body)
        self.registers = {}
        self.lines = [*self._declarations(), *self._statements()]

    def _declarations(self):
        for type_name, names in re.findall(r"\.reg \.(\w+)\s+([^;]*);", self.body):
            for name in map(str.strip, names.split(",")):
                family = re.fullmatch(r"%(\w+)<(\d+)>", name)
                kind = "pred" if type_name == "pred" else f"b{bytes_of(type_name) * 8}"
                if family:
                    yield f"{kind} r_{family[1]}[{family[2]}];"
                else:
                    self.registers[name] = "r_" + re.sub(r"\W", "", name)
                    yield f"{kind} {self.registers[name]};"
        if self.local_bytes:
            yield f"alignas(16) std::byte local_memory[{self.local_bytes}];"

    def _statements(self):
        body = re.sub(r"\.reg [^;]*;|\.pragma[^;]*;|\.loc\s[^\n]*", "", self.body)
        body = re.sub(r"(?m)^\s*[{}]\s*$", "", body)
        for text in re.findall(r"\$[\w$]+:|[^;:]+;", body):
            text = " ".join(text.split())
            if text.endswith(":"):
                yield f"{self._label(text[:-1])}:;"
            elif text != ";":
                yield self._statement(text[:-1])

    def _statement(self, text):
        guard = re.match(r"@(!?)(%\w+) ", text)
        condition = f"if ({guard[1]}{self._value(guard[2])}) " if guard else ""
        opcode, _, rest = text[guard.end() if guard else 0 :].partition(" ")
        words = opcode.split(".")
        if words[0] == "bra":
            return f"{condition}goto {self._label(rest)};"
        if words[0] == "ret":
            return f"{condition}return;"
        types = [word for word in words if word in TYPES]
        names = [word for word in words if word not in TYPES]
        return f"{condition}{{ {self._instruction(names, types, operands(rest))} }}"

    def _instruction(self, names, types, arguments):
        space = next((word for word in names if word in SPACES), "")
        count = next((word[1:] for word in names if re.fullmatch(r"v\d", word)), "1")
        if names[0] == "st":
            address, value = self._address(arguments[0], space), self._value(arguments[1])
            return f"op_st<{types[0]}, {count}>({address}, {value});"
        target, *sources = arguments if names[0] != "bar" else [None, *arguments]
        name, given = "_".join(names), types
        if names[0] == "ld":
            name, given = "ld", [types[0], count]
            sources = [self._address(sources[0], space)]
        elif names[0] == "atom":
            name = f"atom_{names[-1]}"
            sources = [self._address(sources[0], space), *map(self._value, sources[1:])]
        elif names[0] == "cvta":
            name, given, sources = "mov", ["b64"], [self._value(sources[0])]
        elif names[0] == "mov" and target.startswith("{"):
            name, given = "unpack", [types[0], str(len(operands(target[1:-1])))]
            sources = [self._value(sources[0])]
        else:
            sources = [self._value(source) for source in sources]
        of_types = f"<{', '.join(given)}>" if given else ""
        return self._assign(target, f"op_{name}{of_types}({', '.join(sources)})")

    def _assign(self, target, call):
        if target is None:
            return f"{call};"
        if target.startswith("{"):
            parts = enumerate(operands(target[1:-1]))
            stores = [f"{self._value(part)} = bits(v[{i}]);" for i, part in parts if part != "_"]
            return f"const auto v = {call}; {' '.join(stores)}"
        target, _, validity = target.partition("|")
        if validity and len(re.findall(rf"{validity}\b", self.body)) > 1:
            raise ValueError(f"{self.name}: {validity} of a shuffle is used")
        return f"{self._value(target)} = bits({call});"

    def _value(self, text):
        if text.startswith("{"):
            parts = ", ".join(f"b64({self._value(part)})" for part in operands(text[1:-1]))
            return f"std::array{{{parts}}}"
        negated = "!" if text.startswith("!") else ""
        text = text.lstrip("!")
        if text in SPECIAL:
            return SPECIAL[text]
        if text in self.registers:
            return negated + self.registers[text]
        if register := re.fullmatch(r"%([a-z]+)(\d+)", text):
            return f"{negated}r_{register[1]}[{register[2]}]"
        if text in self.parameters:
            return f"(address_of(parameters) + {self.parameters[text]})"
        if text in self.local:
            return f"(address_of(local_memory) + {self.local[text]})"
        if text in self.shared:
            return f"b64({self.shared[text]})"
        if number := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
            return f"0x{number[1]}{'u' if len(number[1]) == 8 else 'ull'}"
        return f"{int(text.rstrip('U'), 0)}ll"

    def _address(self, text, space):
        base, offset = re.fullmatch(r"\[([^+\-\]]+)(?:\+?(-?\d+))?\]", text).groups()
        base = self._value(base.strip())
        if space == "shared":
            base = f"address_of(shared_memory) + b32({base})"
        return f"({base} + {offset or 0}ll)"

    def _label(self, text):
        return "at" + re.sub(r"\W", "_", text)


def translate(ptx, name):
    """The C++ of a .ptx file's text: a table `kernels_of_<name>`, and the functions in it."""
    ptx = re.sub(r"//[^\n]*", "", ptx)
    shared, shared_bytes = placed(SHARED.findall(ptx))
    kernels = [Kernel(*entry, shared) for entry in ENTRY.findall(ptx)]
    assert len(kernels) == ptx.count(".entry"), "an .entry was not understood"
    lines = ['#include "ptx/instructions.h"', "namespace bagua::ptx {", "namespace {"]
    lines.append(f"alignas(16) thread_local std::byte shared_memory[{max(shared_bytes, 1)}];")
    for i, kernel in enumerate(kernels):
        lines.append(f"void kernel_{i}([[maybe_unused]] const std::byte* parameters) {{")
        lines += [*kernel.lines, "}"]
    lines += ["}", f"extern const Translation kernels_of_{name}[];"]
    lines.append(f"const Translation kernels_of_{name}[] = {{")
    lines += [
        f'{{"{kernel.name}", kernel_{i}, {kernel.parameter_bytes}}},'
        for i, kernel in enumerate(kernels)
    ]
    return "\n".join([*lines, "{nullptr, nullptr, 0}};", "}", ""])


def table(names):
    """The C++ of the table of all translated files."""
    declared = [f"extern const Translation kernels_of_{name}[];" for name in names]
    listed = ", ".join(f"kernels_of_{name}" for name in names)
    lines = ['#include "ptx/instructions.h"', "namespace bagua::ptx {", *declared]
    lines.append(f"const Translation* const kTranslations[] = {{{listed}, nullptr}};")
    return "\n".join([*lines, "}", ""])
