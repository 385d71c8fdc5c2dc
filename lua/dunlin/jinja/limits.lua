--- Bounds on what a chat template may be and do. Templates come with model files, so they are third-party input.
return {
  source_bytes = 1024 * 1024,
  output_bytes = 16 * 1024 * 1024,
  nesting = 40, -- of blocks, and of one expression
  calls = 100, -- nested macro calls, and depth of values that are printed
  range = 100000, -- items of one range()
  repeat_bytes = 1024 * 1024, -- one string or list multiplication
}
