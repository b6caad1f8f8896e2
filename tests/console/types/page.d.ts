/** Types that several modules of the page share. `server.d.ts` has the objects that the console's endpoints return. */

/** Content of an element. Texts and numbers become text nodes; null, undefined and false are left out. */
type Child = Node | string | number | null | undefined | false | Child[];

/** What a view gets from the page. */
interface Context {
  api: import("../../../services/forebay/console/static/js/api.js").Api;
  moment: import("../../../services/forebay/console/static/js/moment.js").Moment;
  info: Server.ConsoleInfo;
  state(): Server.CatalogState;
  navigate: Context["moment"]["navigate"];
}

interface View {
  element: HTMLElement;
  refresh(signal: AbortSignal): Promise<void>;
  dispose?(): void;
}

/** A column of a table with rows of type `T`. */
interface Column<T> {
  id: string;
  label: string;
  title?: string;
  isText?: boolean;
  /** Whether the first click on the heading shows the largest values first. */
  isDescendingFirst?: boolean;
  text?(row: T): string;
  /** Updates the cell instead, for content other than text. The cell is empty the first time. */
  fill?(cell: HTMLElement, row: T): void;
  /** The sort key; null sorts last. A column without it cannot be sorted. */
  order?(row: T): number | string | null;
}

/** The part of uPlot that charts use. */
declare class uPlot {
  static paths: { stepped(options: { align: 1 | -1 }): unknown };
  cursor: { left: number; idx: number | null };
  constructor(options: object, data: unknown[][], target: HTMLElement);
  setData(data: unknown[][]): void;
  setSize(size: { width: number; height: number }): void;
  setCursor(place: { left: number; top: number }, isReported?: boolean): void;
  valToPos(value: number, scale: string): number;
  destroy(): void;
}
