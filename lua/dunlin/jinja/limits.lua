--- Bounds on what a chat template may be and do. Templates come with model files, so they are third-party input.
return {
  source_bytes = 1024 * 1024,
  output_bytes = 16 * 1024 * 1024, -- of a rendering and of every text in it
  nesting = 40, -- blocks and expressions in each other
  loops = 16, -- loops in each other, within one macro
  chain = 1000, -- operators, filters or attributes in a row
  arguments = 32, -- of a call or a macro
  calls = 100, -- macros calling each other, and depth of values that are printed
  range = 100000, -- items of one range(), as in Jinja's sandbox
  items = 1000000, -- of one list
}
