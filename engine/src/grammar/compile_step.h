// Where the compilation of a guide may end.
#pragma once

namespace charonia::grammar {

// Asks whether to go on, on the thread of GuideCompiler::compile(). Where not, it throws what that alone catches.
void compile_step();

}  // namespace charonia::grammar
